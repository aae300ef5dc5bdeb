#include "routing/router_tensors.h"

#include "routing/router.h"

#include "conclave/error.h"

#include <algorithm>

namespace conclave::inline v0 {
namespace routing {

const RouterTensor* find_router_tensor(WeightId id) noexcept {
  for (const RouterTensor* tensor : all_router_tensors()) {
    if (tensor->id == id) return tensor;
  }
  return nullptr;
}

std::vector<SizedRouterTensor> router_tensors_of(const MoeSpec& spec) {
  std::vector<SizedRouterTensor> tensors;
  const auto add = [&](const RouterTensor& tensor, std::optional<size_t> place) {
    const RouterTensorSize size = tensor.size(spec);
    if (size.rows > 0) tensors.push_back({.tensor = &tensor, .size = size, .place = place});
  };
  if (const RouterRow* row = find_router(spec.router.name)) {
    for (size_t place = 0; place < row->tensors.size(); ++place) add(row->tensors[place], place);
    return tensors;
  }
  // A router of the application can see a tensor that has a field in RouterWeights.
  for (const RouterTensor* tensor : all_router_tensors()) {
    if (tensor->publish != nullptr) add(*tensor, std::nullopt);
  }
  return tensors;
}

void check_router_tensor_names(const std::map<std::string, ConstTensorView>& by_name) {
  for (const auto& [name, view] : by_name) {
    const auto known = all_router_tensors();
    if (std::ranges::find(known, name, &RouterTensor::name) != known.end()) continue;
    std::string names;
    for (const RouterTensor* tensor : known) {
      names += (names.empty() ? "" : ", ") + std::string(tensor->name);
    }
    throw Error(ErrorCode::kUnknownName, {.what = "no router has a tensor of this name",
                                          .tensor = name,
                                          .expected = "one of " + names});
  }
}

void set_router_tensor(const SizedRouterTensor& tensor, const void* values,
                       RouterWeights& weights) {
  if (tensor.place) weights.tensors[*tensor.place] = values;
  if (tensor.tensor->publish != nullptr) tensor.tensor->publish(weights, values);
}

}  // namespace routing

std::vector<WeightId> router_tensors() {
  std::vector<WeightId> ids;
  for (const routing::RouterTensor* tensor : routing::all_router_tensors())
    ids.push_back(*tensor->id);
  return ids;
}

}  // namespace conclave::inline v0

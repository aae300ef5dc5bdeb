#include "adapters.h"

#include "arrays.h"
#include "names.h"

#include "conclave/checkpoint.h"
#include "conclave/error.h"
#include "conclave/lora.h"
#include "conclave/lora_checkpoint.h"
#include "conclave/refit.h"

#include <cstdint>
#include <list>
#include <nanobind/stl/optional.h>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave::python {
namespace {

// One factor of all experts of an MLP: [E, rows, cols], or [rows, cols] of one expert.
class Stack {
 public:
  Stack(nb::handle object, const std::string& name) : array_(object, name.c_str()) {
    array_.require_device({});
    const int rank = array_.rank();
    const bool is_dense = rank >= 2 && (array_.shape().back() <= 1 || array_.strides().back() == 1);
    if ((rank == 2 || rank == 3) && is_dense) return;
    throw Error(rank == 2 || rank == 3 ? ErrorCode::kStride : ErrorCode::kShape,
                {.what = "factors are matrices with dense rows, of one expert or of each",
                 .tensor = name,
                 .expected = "[experts, rows, columns]",
                 .found = array_.shape_text()});
  }

  int64_t experts() const { return array_.rank() == 3 ? array_.shape()[0] : 1; }
  ConstTensorView of(int64_t expert) const {
    const auto axis = static_cast<size_t>(array_.rank() - 2);
    const int64_t step = axis == 1 ? array_.strides()[0] : 0;
    const int64_t cols = array_.shape()[axis + 1];
    return {.data = static_cast<const std::byte*>(array_.data()) +
                    expert * step * byte_size(array_.dtype()),
            .dtype = array_.dtype(),
            .shape = {array_.shape()[axis], cols},
            .row_stride = array_.shape()[axis] > 1 ? array_.strides()[axis] : cols};
  }

 private:
  Array array_;
};

struct FactorName {
  const char* name;
  WeightMlp mlp;
  WeightMatrix matrix;
};
constexpr FactorName kFactors[] = {{"gate", WeightMlp::kRouted, WeightMatrix::kGate},
                                   {"up", WeightMlp::kRouted, WeightMatrix::kUp},
                                   {"down", WeightMlp::kRouted, WeightMatrix::kDown},
                                   {"shared_gate", WeightMlp::kShared, WeightMatrix::kGate},
                                   {"shared_up", WeightMlp::kShared, WeightMatrix::kUp},
                                   {"shared_down", WeightMlp::kShared, WeightMatrix::kDown}};

[[noreturn]] void refuse(ErrorCode code, const std::string& name, std::string what) {
  throw Error(code, {.what = std::move(what), .tensor = name});
}

// Every array must belong to a factor that this knows.
void check_names(const nb::dict& arrays) {
  for (const auto& [key, value] : arrays) {
    const std::string name = nb::cast<std::string>(key);
    bool known = false;
    for (const FactorName& factor : kFactors) {
      const std::string begin = factor.name;
      known = known || name == begin + "_a" || name == begin + "_b";
    }
    if (!known) refuse(ErrorCode::kInvalidArgument, name, "an adapter has no factor of this name");
  }
}

int32_t add_arrays(PyLayer& self, const nb::dict& arrays, double scale, const std::string& name) {
  check_names(arrays);
  LoraAdapter adapter{.name = name};
  std::list<std::string> names;
  std::list<Stack> stacks;
  const auto stack = [&](const std::string& array) -> const Stack* {
    if (!arrays.contains(array.c_str())) return nullptr;
    return &stacks.emplace_back(arrays[array.c_str()], names.emplace_back(array));
  };
  for (const FactorName& factor : kFactors) {
    const std::string begin = factor.name;
    const Stack* const a = stack(begin + "_a");
    const Stack* const b = stack(begin + "_b");
    if (a == nullptr && b == nullptr) continue;
    if (a == nullptr || b == nullptr) {
      refuse(ErrorCode::kTensorMissing, begin + (a == nullptr ? "_a" : "_b"),
             "one of two factors is missing");
    }
    if (a->experts() != b->experts()) {
      refuse(ErrorCode::kShape, begin + "_b", "the two factors have other numbers of experts");
    }
    for (int64_t expert = 0; expert < a->experts(); ++expert) {
      adapter.factors.push_back({.mlp = factor.mlp,
                                 .matrix = factor.matrix,
                                 .expert = expert,
                                 .a = a->of(expert),
                                 .b = b->of(expert),
                                 .scale = scale,
                                 .name = begin});
    }
  }
  const nb::gil_scoped_release released;
  return self.first_layer().add_adapter(adapter);
}

int32_t add_directory(PyLayer& self, const std::string& directory, int64_t index,
                      const std::optional<std::string>& order, const Checkpoint* model) {
  const std::optional<GateUpOrder> own =
      order ? std::optional(parse_word<GateUpOrder>("gate_up_order", *order)) : std::nullopt;
  const nb::gil_scoped_release released;
  const LoraCheckpoint adapters = LoraCheckpoint::open(directory);
  if (model != nullptr && !own) {
    return self.first_layer().add_adapter(adapters.layer(index, *model));
  }
  return self.first_layer().add_adapter(
      adapters.layer(index, self.layer().spec(), own.value_or(GateUpOrder::kConcatenated)));
}

nb::typed<nb::list, nb::dict> adapters_of(const PyLayer& self) {
  nb::list list;
  for (const AdapterInfo& info : self.layer().adapters()) {
    nb::dict dict;
    dict["id"] = info.id;
    dict["name"] = info.name;
    dict["max_rank"] = info.max_rank;
    dict["num_factors"] = info.num_factors;
    dict["bytes"] = info.bytes;
    list.append(dict);
  }
  return nb::typed<nb::list, nb::dict>(std::move(list));
}

}  // namespace

void bind_adapters(nb::class_<PyLayer>& layer) {
  layer.def("add_adapter_from_arrays", &add_arrays, nb::arg("arrays"), nb::arg("scale"),
            nb::arg("name"), "Adds an adapter of arrays by their names; returns its id.");
  layer.def("add_adapter_from_directory", &add_directory, nb::arg("directory"), nb::arg("index"),
            nb::arg("gate_up_order").none(), nb::arg("checkpoint").none(),
            "Adds a layer's part of an adapter that PEFT saved; returns its id.");
  layer.def(
      "forget_graphs",
      [](PyLayer& self) {
        const nb::gil_scoped_release released;
        return GraphReplay::forget_graphs(self.first_layer());
      },
      "Gives back adapters that only graphs could read.");
  layer.def(
      "remove_adapter", [](PyLayer& self, int32_t id) { self.first_layer().remove_adapter(id); },
      nb::arg("id"), "Removes an adapter; forwards under way keep it.");
  layer.def("adapters", &adapters_of, "The adapters that the layer has.");
}

}  // namespace conclave::python

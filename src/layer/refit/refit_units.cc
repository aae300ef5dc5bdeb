#include "layer/refit/refit_units.h"

#include "layer/packed_weights.h"
#include "spec/layer_weights.h"

#include "conclave/error.h"

#include <algorithm>
#include <functional>

namespace conclave::inline v0 {
namespace {

constexpr size_t kHalves = 2;  // gate with up, and down
constexpr size_t kOtherMlps = 2;
constexpr size_t kLayerWeights = static_cast<size_t>(LayerWeight::kOutputBias) + 1;

bool is_down(WeightId id) { return id.matrix() == WeightMatrix::kDown; }
bool is_routed(WeightId id) { return id.mlp() == WeightMlp::kRouted; }

void check_experts(const MoeSpec& spec, const RefitScope& scope) {
  for (const int32_t expert : scope.experts) {
    if (expert >= 0 && expert < spec.num_experts) continue;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a refit names an expert that the layer does not have",
                 .tensor = "RefitScope.experts",
                 .found = std::to_string(expert),
                 .limit = std::to_string(spec.num_experts - 1)});
  }
}

void check_tensors(const std::vector<WeightShape>& shapes, const RefitScope& scope) {
  for (const WeightId id : scope.tensors) {
    if (std::ranges::any_of(shapes, [&](const WeightShape& shape) { return shape.id == id; })) {
      continue;
    }
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a refit names a tensor that the layer does not have",
                 .tensor = "RefitScope.tensors",
                 .found = to_string(id)});
  }
}

}  // namespace

RefitUnits::RefitUnits(int64_t num_experts)
    : num_experts_(num_experts),
      bits_(kHalves * static_cast<size_t>(num_experts) + kHalves * kOtherMlps + kLayerWeights) {}

size_t RefitUnits::index(WeightId id, int64_t expert) const {
  const auto experts = static_cast<size_t>(num_experts_);
  if (is_routed(id)) return (is_down(id) ? experts : 0) + static_cast<size_t>(expert);
  const size_t others = kHalves * experts;
  if (id.mlp()) {
    const size_t mlp = id.mlp() == WeightMlp::kShared ? 0 : 1;
    return others + kHalves * mlp + (is_down(id) ? 1 : 0);
  }
  return others + kHalves * kOtherMlps + static_cast<size_t>(*id.layer());
}

bool RefitUnits::has_any(WeightId id) const {
  if (!is_routed(id)) return has(id, 0);
  for (int64_t expert = 0; expert < num_experts_; ++expert) {
    if (has(id, expert)) return true;
  }
  return false;
}

bool RefitUnits::covers(const RefitUnits& other) const { return first_missing(other).empty(); }

void RefitUnits::add(const RefitUnits& other) {
  for (size_t i = 0; i < bits_.size(); ++i) bits_[i] = bits_[i] || other.bits_[i];
}

void RefitUnits::remove(const RefitUnits& other) {
  for (size_t i = 0; i < bits_.size(); ++i) bits_[i] = bits_[i] && !other.bits_[i];
}

std::string RefitUnits::first_missing(const RefitUnits& wanted) const {
  for (const WeightId id : weights::kAll) {
    const int64_t count = is_routed(id) ? num_experts_ : 1;
    for (int64_t expert = 0; expert < count; ++expert) {
      if (!wanted.has(id, expert) || has(id, expert)) continue;
      return to_string(id) + (is_routed(id) ? " of expert " + std::to_string(expert) : "");
    }
  }
  return {};
}

int64_t RefitUnits::key() const {
  return static_cast<int64_t>(std::hash<std::vector<bool>>()(bits_) >> 2U);
}

RefitUnits units_of(const MoeSpec& spec, const RefitScope& scope) {
  const std::vector<WeightShape> shapes = layer_weights(spec);
  check_experts(spec, scope);
  check_tensors(shapes, scope);
  RefitUnits units(spec.num_experts);
  for (const WeightShape& shape : shapes) {
    const bool is_named = scope.tensors.empty()
                              ? scope.experts.empty() || is_routed(shape.id)
                              : std::ranges::find(scope.tensors, shape.id) != scope.tensors.end();
    if (!is_named) continue;
    if (!is_routed(shape.id)) {
      units.add(shape.id, 0);
    } else if (scope.experts.empty()) {
      for (int64_t expert = 0; expert < spec.num_experts; ++expert) units.add(shape.id, expert);
    } else {
      for (const int32_t expert : scope.experts) units.add(shape.id, expert);
    }
  }
  return units;
}

RefitUnits all_units(const MoeSpec& spec) { return units_of(spec, {}); }

void check_source_of(const MoeSpec& spec, const WeightSource& source, const RefitUnits& units) {
  for (const WeightShape& shape : layer_weights(spec)) {
    if (units.has_any(shape.id)) check_weights_of(source, shape);
  }
}

}  // namespace conclave::inline v0

#include "core/layer_roles.h"

#include "core/checked.h"
#include "core/weight_id.h"
#include "core/weight_types.h"

#include <algorithm>
#include <utility>

namespace conclave::inline v0 {
namespace {

class RoleList {
 public:
  explicit RoleList(const MoeSpec& spec) : spec_(spec) {}

  std::vector<LayerRole> take() {
    std::sort(roles_.begin(), roles_.end(),
              [](const LayerRole& a, const LayerRole& b) { return a.role < b.role; });
    return std::move(roles_);
  }

  void add_experts() {
    const int64_t experts = spec_.num_experts;
    const int64_t width = expert_width(spec_);
    const int64_t inner = spec_.intermediate_size;
    const bool gated = is_gated(spec_.activation);
    const DType dtype = spec_.weight_dtype;
    if (gated) matrix(WeightRole::kGate, experts, inner, width, dtype);
    matrix(WeightRole::kUp, experts, inner, width, dtype);
    matrix(WeightRole::kDown, experts, width, inner, dtype);
    if (!spec_.has_bias) return;
    if (gated) vector(WeightRole::kGateBias, inner, experts);
    vector(WeightRole::kUpBias, inner, experts);
    vector(WeightRole::kDownBias, width, experts);
  }

  void add_router() {
    const RouterSpec& router = spec_.router;
    const int64_t logits = num_logits(spec_);
    const int64_t hidden = spec_.hidden_size;
    if (spec_.has_gate) {
      dense(WeightRole::kRouter, logits, hidden);
      if (router.has_logit_bias) vector(WeightRole::kRouterBias, logits);
      if (router.input_norm.enabled) vector(WeightRole::kRouterInputScale, hidden);
    }
    if (router.has_selection_bias) {
      vector(WeightRole::kSelectionBias, spec_.num_experts + spec_.num_zero_experts);
    }
    if (router.has_expert_scale) vector(WeightRole::kExpertScale, spec_.num_experts);
    if (router.has_global_scale) vector(WeightRole::kGlobalScale, 1);
    if (router.vocab_size > 0) {
      roles_.push_back({.role = WeightRole::kHashTable,
                        .count = 1,
                        .rows = router.vocab_size,
                        .cols = spec_.top_k,
                        .dtype = RoleDType::kIndex});
    }
  }

  void add_shared() {
    const SharedExpertSpec& shared = spec_.shared;
    if (shared.mode == SharedMode::kNone) return;
    const int64_t hidden = spec_.hidden_size;
    const int64_t inner = shared.intermediate_size;
    const bool gated = is_gated(activation_or_routed(shared.activation, spec_));
    const DType dtype = shared_weight_dtype(spec_);
    if (gated) matrix(WeightRole::kSharedGate, shared.count, inner, hidden, dtype);
    matrix(WeightRole::kSharedUp, shared.count, inner, hidden, dtype);
    matrix(WeightRole::kSharedDown, shared.count, hidden, inner, dtype);
    if (shared.has_bias) {
      if (gated) vector(WeightRole::kSharedGateBias, inner, shared.count);
      vector(WeightRole::kSharedUpBias, inner, shared.count);
      vector(WeightRole::kSharedDownBias, hidden, shared.count);
    }
    if (shared.mode == SharedMode::kSigmoidGate) dense(WeightRole::kSharedExpertGate, 1, hidden);
    if (shared.mode == SharedMode::kSoftmaxMix) {
      dense(WeightRole::kMixGate, 2, hidden);
      vector(WeightRole::kMixGateBias, 2);
      roles_.back().optional = true;
    }
  }

  void add_projections() {
    const int64_t hidden = spec_.hidden_size;
    const LatentSpec& latent = spec_.latent;
    if (latent.size != 0) {
      dense(WeightRole::kLatentDown, latent.size, hidden);
      if (latent.has_norm) vector(WeightRole::kLatentNorm, latent.size);
      dense(WeightRole::kLatentUp, hidden, latent.size);
    }
    if (spec_.has_output_bias) vector(WeightRole::kOutputBias, hidden);
    const int64_t inner = spec_.residual.intermediate_size;
    if (inner == 0) return;
    const DType dtype = spec_.residual.weight_dtype.value_or(spec_.weight_dtype);
    if (is_gated(activation_or_routed(spec_.residual.activation, spec_))) {
      matrix(WeightRole::kResidualGate, 1, inner, hidden, dtype);
    }
    matrix(WeightRole::kResidualUp, 1, inner, hidden, dtype);
    matrix(WeightRole::kResidualDown, 1, hidden, inner, dtype);
  }

 private:
  void matrix(WeightRole role, int64_t count, int64_t rows, int64_t cols, DType dtype) {
    roles_.push_back({.role = role,
                      .count = count,
                      .rows = rows,
                      .cols = cols,
                      .dtype = RoleDType::kWeight,
                      .weight_dtype = dtype});
    if (!is_plain(dtype)) scales_of(role, count, rows, cols);
  }
  void scales_of(WeightRole role, int64_t count, int64_t rows, int64_t cols) {
    const ScaleShape shape = scale_shape(spec_.quant, rows, cols);
    scale(plane_of(role, Plane::kScale), count, shape);
    if (spec_.quant.activations != ActivationScale::kTensorStatic) return;
    scale(plane_of(role, Plane::kInputScale), count, {.rows = 1, .cols = 1});
  }
  void scale(WeightRole role, int64_t count, const ScaleShape& shape) {
    roles_.push_back({.role = role,
                      .count = count,
                      .rows = shape.rows,
                      .cols = shape.cols,
                      .dtype = RoleDType::kScale});
  }
  void dense(WeightRole role, int64_t rows, int64_t cols) {
    roles_.push_back({.role = role, .count = 1, .rows = rows, .cols = cols});
  }
  void vector(WeightRole role, int64_t size, int64_t count = 1) {
    roles_.push_back({.role = role, .count = count, .rows = 1, .cols = size});
  }

  const MoeSpec& spec_;
  std::vector<LayerRole> roles_;
};

}  // namespace

std::vector<LayerRole> layer_roles(const MoeSpec& spec) {
  RoleList list(spec);
  list.add_experts();
  list.add_router();
  list.add_shared();
  list.add_projections();
  return list.take();
}

ScaleShape scale_shape(const QuantSpec& quant, int64_t rows, int64_t cols) {
  switch (quant.weights) {
    case WeightScale::kChannel:
      return {.rows = rows, .cols = 1};
    case WeightScale::kBlock:
      return {.rows = ceil_div(rows, quant.block_rows), .cols = ceil_div(cols, quant.block_cols)};
    case WeightScale::kNone:
    case WeightScale::kTensor:
      break;
  }
  return {.rows = 1, .cols = 1};
}

const ActivationSpec& activation_or_routed(const ActivationSpec& own, const MoeSpec& spec) {
  return own.name.empty() ? spec.activation : own;
}

}  // namespace conclave::inline v0

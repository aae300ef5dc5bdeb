#include "checkpoint/role_shape.h"

#include "core/layer_roles.h"
#include "core/weight_types.h"

namespace conclave::inline v0::checkpoint {
namespace {

RoleShape matrix(int64_t count, int64_t rows, int64_t cols) {
  return {.count = count, .rows = rows, .cols = cols};
}

RoleShape vector_if(bool present, int64_t size, int64_t count = 1) {
  return {.count = present ? count : 0, .rows = 1, .cols = size, .is_vector = true};
}

RoleShape matrix_if(bool present, int64_t rows, int64_t cols) {
  return matrix(present ? 1 : 0, rows, cols);
}

RoleShape expert_shape(const MoeSpec& spec, WeightRole role) {
  const int64_t experts = spec.num_experts;
  const int64_t width = expert_width(spec);
  const bool gated = is_gated(spec.activation);
  switch (role) {
    case WeightRole::kGate:
      return matrix(gated ? experts : 0, spec.intermediate_size, width);
    case WeightRole::kUp:
      return matrix(experts, spec.intermediate_size, width);
    case WeightRole::kDown:
      return matrix(experts, width, spec.intermediate_size);
    case WeightRole::kGateBias:
      return vector_if(spec.has_bias && gated, spec.intermediate_size, experts);
    case WeightRole::kUpBias:
      return vector_if(spec.has_bias, spec.intermediate_size, experts);
    default:
      return vector_if(spec.has_bias, width, experts);
  }
}

RoleShape shared_shape(const MoeSpec& spec, WeightRole role) {
  const SharedExpertSpec& shared = spec.shared;
  if (shared.mode == SharedMode::kNone) return {};
  const int64_t size = shared.intermediate_size;
  const bool gated = is_gated(shared.activation.name.empty() ? spec.activation : shared.activation);
  switch (role) {
    case WeightRole::kSharedGate:
      return matrix(gated ? shared.count : 0, size, spec.hidden_size);
    case WeightRole::kSharedUp:
      return matrix(shared.count, size, spec.hidden_size);
    case WeightRole::kSharedDown:
      return matrix(shared.count, spec.hidden_size, size);
    case WeightRole::kSharedGateBias:
      return vector_if(shared.has_bias && gated, size, shared.count);
    case WeightRole::kSharedUpBias:
      return vector_if(shared.has_bias, size, shared.count);
    default:
      return vector_if(shared.has_bias, spec.hidden_size, shared.count);
  }
}

RoleShape router_shape(const MoeSpec& spec, WeightRole role) {
  const RouterSpec& router = spec.router;
  switch (role) {
    case WeightRole::kRouter:
      return matrix(1, num_logits(spec), spec.hidden_size);
    case WeightRole::kRouterBias:
      return vector_if(router.has_logit_bias, num_logits(spec));
    case WeightRole::kSelectionBias:
      return vector_if(router.has_selection_bias, spec.num_experts + spec.num_zero_experts);
    case WeightRole::kExpertScale:
      return vector_if(router.has_expert_scale, spec.num_experts);
    case WeightRole::kGlobalScale:
      return vector_if(router.has_global_scale, 1);
    case WeightRole::kRouterInputScale:
      return vector_if(router.input_norm.enabled, spec.hidden_size);
    default:
      return matrix_if(router.vocab_size > 0, router.vocab_size, spec.top_k);
  }
}

// The shape of a matrix's scales; empty if the matrix is plain.
RoleShape scale_shape_of(const MoeSpec& spec, WeightRole matrix, DType dtype) {
  if (is_plain(dtype)) return {};
  const RoleShape of = role_shape(spec, matrix);
  const ScaleShape scales = scale_shape(spec.quant, of.rows, of.cols);
  return {.count = of.count, .rows = scales.rows, .cols = scales.cols};
}

RoleShape input_scale_shape(const MoeSpec& spec, WeightRole matrix, DType dtype) {
  const bool is_static = spec.quant.activations == ActivationScale::kTensorStatic;
  if (is_plain(dtype) || !is_static) return {};
  return {.count = role_shape(spec, matrix).count, .rows = 1, .cols = 1};
}

RoleShape quant_shape(const MoeSpec& spec, WeightRole role) {
  const DType shared = shared_weight_dtype(spec);
  switch (role) {
    case WeightRole::kGateScale:
      return scale_shape_of(spec, WeightRole::kGate, spec.weight_dtype);
    case WeightRole::kUpScale:
      return scale_shape_of(spec, WeightRole::kUp, spec.weight_dtype);
    case WeightRole::kDownScale:
      return scale_shape_of(spec, WeightRole::kDown, spec.weight_dtype);
    case WeightRole::kGateInputScale:
      return input_scale_shape(spec, WeightRole::kGate, spec.weight_dtype);
    case WeightRole::kUpInputScale:
      return input_scale_shape(spec, WeightRole::kUp, spec.weight_dtype);
    case WeightRole::kDownInputScale:
      return input_scale_shape(spec, WeightRole::kDown, spec.weight_dtype);
    case WeightRole::kSharedGateScale:
      return scale_shape_of(spec, WeightRole::kSharedGate, shared);
    case WeightRole::kSharedUpScale:
      return scale_shape_of(spec, WeightRole::kSharedUp, shared);
    case WeightRole::kSharedDownScale:
      return scale_shape_of(spec, WeightRole::kSharedDown, shared);
    case WeightRole::kSharedGateInputScale:
      return input_scale_shape(spec, WeightRole::kSharedGate, shared);
    case WeightRole::kSharedUpInputScale:
      return input_scale_shape(spec, WeightRole::kSharedUp, shared);
    default:
      return input_scale_shape(spec, WeightRole::kSharedDown, shared);
  }
}

}  // namespace

RoleShape role_shape(const MoeSpec& spec, WeightRole role) {
  const int64_t hidden = spec.hidden_size;
  const int64_t residual = spec.residual.intermediate_size;
  const ActivationSpec& residual_activation =
      spec.residual.activation.name.empty() ? spec.activation : spec.residual.activation;
  const bool mixed = spec.shared.mode == SharedMode::kSoftmaxMix;
  switch (role) {
    case WeightRole::kGate:
    case WeightRole::kUp:
    case WeightRole::kDown:
    case WeightRole::kGateBias:
    case WeightRole::kUpBias:
    case WeightRole::kDownBias:
      return expert_shape(spec, role);
    case WeightRole::kSharedGate:
    case WeightRole::kSharedUp:
    case WeightRole::kSharedDown:
    case WeightRole::kSharedGateBias:
    case WeightRole::kSharedUpBias:
    case WeightRole::kSharedDownBias:
      return shared_shape(spec, role);
    case WeightRole::kRouter:
    case WeightRole::kRouterBias:
    case WeightRole::kSelectionBias:
    case WeightRole::kExpertScale:
    case WeightRole::kGlobalScale:
    case WeightRole::kRouterInputScale:
    case WeightRole::kHashTable:
      return router_shape(spec, role);
    case WeightRole::kSharedExpertGate:
      return matrix_if(spec.shared.mode == SharedMode::kSigmoidGate, 1, hidden);
    case WeightRole::kMixGate:
      return matrix_if(mixed, 2, hidden);
    case WeightRole::kMixGateBias: {
      RoleShape shape = vector_if(mixed, 2);
      shape.is_optional = true;
      return shape;
    }
    case WeightRole::kLatentDown:
      return matrix_if(spec.latent.size > 0, spec.latent.size, hidden);
    case WeightRole::kLatentNorm:
      return vector_if(spec.latent.size > 0 && spec.latent.has_norm, spec.latent.size);
    case WeightRole::kLatentUp:
      return matrix_if(spec.latent.size > 0, hidden, spec.latent.size);
    case WeightRole::kOutputBias:
      return vector_if(spec.has_output_bias, hidden);
    case WeightRole::kResidualGate:
      return matrix_if(residual > 0 && is_gated(residual_activation), residual, hidden);
    case WeightRole::kResidualUp:
      return matrix_if(residual > 0, residual, hidden);
    case WeightRole::kResidualDown:
      return matrix_if(residual > 0, hidden, residual);
    case WeightRole::kGateScale:
    case WeightRole::kUpScale:
    case WeightRole::kDownScale:
    case WeightRole::kGateInputScale:
    case WeightRole::kUpInputScale:
    case WeightRole::kDownInputScale:
    case WeightRole::kSharedGateScale:
    case WeightRole::kSharedUpScale:
    case WeightRole::kSharedDownScale:
    case WeightRole::kSharedGateInputScale:
    case WeightRole::kSharedUpInputScale:
    case WeightRole::kSharedDownInputScale:
      return quant_shape(spec, role);
  }
  return {};
}

}  // namespace conclave::inline v0::checkpoint

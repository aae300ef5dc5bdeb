#include "spec/layer_weights.h"

#include "core/checked.h"
#include "core/part_spec.h"
#include "core/shared_facts.h"
#include "quant/plane_types.h"
#include "routing/router_tensors.h"

#include "conclave/error.h"

#include <algorithm>
#include <utility>

namespace conclave::inline v0 {
namespace {

// One of the MLPs of a layer, `count` times.
struct MlpShape {
  WeightMlp mlp = WeightMlp::kRouted;
  int64_t count = 0;
  int64_t inner = 0;
  int64_t width = 0;
  bool is_gated = true;
  bool has_bias = false;
  DType dtype = DType::kF32;
};

class WeightList {
 public:
  explicit WeightList(const MoeSpec& spec) : spec_(spec) {}

  std::vector<WeightShape> take() { return std::move(list_); }

  void add_mlps() {
    add_mlp({.mlp = WeightMlp::kRouted,
             .count = spec_.num_experts,
             .inner = spec_.intermediate_size,
             .width = expert_width(spec_),
             .is_gated = is_gated(spec_.activation),
             .has_bias = spec_.has_bias,
             .dtype = spec_.weight_dtype});
    const SharedExpertSpec& shared = spec_.shared;
    if (shared_facts(shared).is_there) {
      add_mlp({.mlp = WeightMlp::kShared,
               .count = shared.count,
               .inner = shared.intermediate_size,
               .width = spec_.hidden_size,
               .is_gated = is_gated(activation_or_routed(shared.activation, spec_)),
               .has_bias = shared.has_bias,
               .dtype = shared_weight_dtype(spec_)});
    }
    const ResidualMlpSpec& residual = spec_.residual;
    if (residual.intermediate_size != 0) {
      add_mlp({.mlp = WeightMlp::kResidual,
               .count = 1,
               .inner = residual.intermediate_size,
               .width = spec_.hidden_size,
               .is_gated = is_gated(activation_or_routed(residual.activation, spec_)),
               .dtype = residual.weight_dtype.value_or(spec_.weight_dtype)});
    }
  }

  void add_router() {
    const RouterSpec& router = spec_.router;
    const int64_t logits = num_logits(spec_);
    const int64_t hidden = spec_.hidden_size;
    if (spec_.has_gate) {
      matrix(LayerWeight::kRouter, logits, hidden);
      if (router.has_logit_bias) vector(LayerWeight::kRouterBias, logits);
      if (router.input_norm.enabled) vector(LayerWeight::kRouterInputScale, hidden);
    }
    if (router.has_selection_bias) {
      vector(LayerWeight::kSelectionBias, spec_.num_experts + spec_.num_zero_experts);
    }
    if (router.has_expert_scale) vector(LayerWeight::kExpertScale, spec_.num_experts);
    if (router.has_global_scale) vector(LayerWeight::kGlobalScale, 1);
    for (const routing::SizedRouterTensor& own : routing::router_tensors_of(spec_)) {
      if (!own.tensor->id) continue;
      const bool is_index = own.tensor->element == routing::RouterElement::kIndex;
      list_.push_back({.id = *own.tensor->id,
                       .count = 1,
                       .rows = own.size.rows,
                       .cols = own.size.cols,
                       .type = is_index ? quant::PlaneType::kIndex : quant::PlaneType::kFloat,
                       .is_optional = own.tensor->is_optional,
                       .is_vector = own.tensor->is_vector});
    }
  }

  void add_mixing() {
    const int64_t hidden = spec_.hidden_size;
    if (shared_facts(spec_.shared).has_sigmoid_gate()) {
      matrix(LayerWeight::kSharedExpertGate, 1, hidden);
    }
    if (shared_facts(spec_.shared).has_mix_gate()) {
      matrix(LayerWeight::kMixGate, 2, hidden);
      vector(LayerWeight::kMixGateBias, 2);
      list_.back().is_optional = true;
    }
    const LatentSpec& latent = spec_.latent;
    if (latent.size != 0) {
      matrix(LayerWeight::kLatentDown, latent.size, hidden);
      if (latent.has_norm) vector(LayerWeight::kLatentNorm, latent.size);
      matrix(LayerWeight::kLatentUp, hidden, latent.size);
    }
    if (spec_.has_output_bias) vector(LayerWeight::kOutputBias, hidden);
  }

 private:
  void add_mlp(const MlpShape& mlp) {
    if (mlp.is_gated) add_matrix(mlp, WeightMatrix::kGate, mlp.inner, mlp.width);
    add_matrix(mlp, WeightMatrix::kUp, mlp.inner, mlp.width);
    add_matrix(mlp, WeightMatrix::kDown, mlp.width, mlp.inner);
  }
  void add_matrix(const MlpShape& mlp, WeightMatrix matrix, int64_t rows, int64_t cols) {
    for (const quant::PlaneShape& plane : quant::planes_of(mlp.dtype, spec_.quant, rows, cols)) {
      add_plane(mlp, matrix, plane);
    }
    if (mlp.has_bias) add_plane(mlp, matrix, quant::bias_of(rows));
  }
  void add_plane(const MlpShape& mlp, WeightMatrix matrix, const quant::PlaneShape& plane) {
    list_.push_back({.id = {mlp.mlp, matrix, plane.plane},
                     .count = mlp.count,
                     .rows = plane.rows,
                     .cols = plane.cols,
                     .type = plane.type,
                     .dtype = mlp.dtype,
                     .is_optional = plane.is_optional,
                     .is_vector = plane.plane == WeightPlane::kBias,
                     .plane = plane});
  }
  void matrix(LayerWeight weight, int64_t rows, int64_t cols) {
    list_.push_back({.id = weight, .count = 1, .rows = rows, .cols = cols});
  }
  void vector(LayerWeight weight, int64_t size) {
    list_.push_back({.id = weight, .count = 1, .rows = 1, .cols = size, .is_vector = true});
  }

  const MoeSpec& spec_;
  std::vector<WeightShape> list_;
};

}  // namespace

std::vector<WeightShape> layer_weights(const MoeSpec& spec) {
  WeightList list(spec);
  list.add_mlps();
  list.add_router();
  list.add_mixing();
  return list.take();
}

bool is_stored_as(const WeightShape& shape, DType dtype) {
  if (shape.type == quant::PlaneType::kWeights) return dtype == shape.dtype;
  return std::ranges::find(quant::types_of(shape.type), dtype) != quant::types_of(shape.type).end();
}

ParameterCount count_weights(const MoeSpec& spec) {
  const auto times = [](int64_t a, int64_t b) {
    if (const auto product = checked_mul(a, b)) return *product;
    throw Error(ErrorCode::kSizeOverflow, "the parameter count of a layer does not fit 63 bits");
  };
  ParameterCount parameters;
  for (const WeightShape& shape : layer_weights(spec)) {
    const bool counts =
        shape.type == quant::PlaneType::kWeights || shape.type == quant::PlaneType::kFloat;
    if (shape.is_optional || !counts || quant::is_code_plane(shape.id.plane())) continue;
    const int64_t each = times(shape.rows, shape.cols);
    parameters.total += times(shape.count, each);
    // Zero experts have no weights; a token uses at most all experts that have.
    const int64_t used = std::min(spec.top_k, spec.num_experts);
    parameters.active += (shape.id.mlp() == WeightMlp::kRouted ? used : shape.count) * each;
  }
  return parameters;
}

}  // namespace conclave::inline v0

#include "layer/adapters/adapter_parts.h"

#include "core/part_spec.h"
#include "core/row_stride.h"

namespace conclave::inline v0 {
namespace {

using experts::AdapterShape;
using experts::ExpertAdapter;
using experts::MatrixFactors;

ConstTensorView rows_of(const ConstTensorView& view, const TensorSlice& slice) {
  const int64_t stride = row_stride(view);
  return {.data = static_cast<const std::byte*>(view.data) +
                  slice.begin * stride * byte_size(view.dtype),
          .dtype = view.dtype,
          .shape = {slice.size(), view.shape[1]},
          .row_stride = stride};
}

ConstTensorView columns_of(const ConstTensorView& view, const TensorSlice& slice) {
  const int64_t stride = row_stride(view);
  return {.data = static_cast<const std::byte*>(view.data) + slice.begin * byte_size(view.dtype),
          .dtype = view.dtype,
          .shape = {view.shape[0], slice.size()},
          .row_stride = stride};
}

// Slices of gate and up have rows of `b`, those of down columns of `a`: sums over ranks of what
// they contribute are the whole.
MatrixFactors slice_of(MatrixFactors factors, bool is_down, const TensorSlice& slice) {
  if (factors.empty()) return factors;
  if (is_down) {
    factors.a = columns_of(factors.a, slice);
  } else {
    factors.b = rows_of(factors.b, slice);
  }
  return factors;
}

MatrixFactors own_factors(const LoraFactors& factors, const TensorSlice& inner) {
  return slice_of({.a = factors.a, .b = factors.b, .scale = static_cast<float>(factors.scale)},
                  factors.matrix == WeightMatrix::kDown, inner);
}

MatrixFactors& matrix_of(ExpertAdapter& expert, WeightMatrix matrix) {
  if (matrix == WeightMatrix::kGate) return expert.gate;
  return matrix == WeightMatrix::kUp ? expert.up : expert.down;
}

// All of an adapter has one type: its own, or float32 where it has several.
DType common_dtype(const LoraAdapter& adapter) {
  const DType first = adapter.factors.front().a.dtype;
  for (const LoraFactors& factors : adapter.factors) {
    if (factors.a.dtype != first || factors.b.dtype != first) return DType::kF32;
  }
  return first;
}

}  // namespace

AdapterPart routed_adapter_part(const PlanBase& plan, const LoraAdapter& adapter,
                                std::span<const int32_t> places) {
  AdapterPart part{
      .shape = {.hidden_size = expert_width(plan.spec),
                .intermediate_size = plan.part.inner.size(),
                .gated = is_gated(plan.spec.activation),
                .dtype = common_dtype(adapter)},
      .experts = std::vector<ExpertAdapter>(static_cast<size_t>(plan.part.num_places()))};
  if (plan.part.inner.size() == 0) return part;
  for (const LoraFactors& factors : adapter.factors) {
    if (factors.mlp != WeightMlp::kRouted) continue;
    // Replicas of an expert have places of their own.
    for (size_t place = 0; place < places.size(); ++place) {
      if (places[place] != factors.expert) continue;
      matrix_of(part.experts[place], factors.matrix) = own_factors(factors, plan.part.inner);
    }
  }
  return part;
}

AdapterPart shared_adapter_part(const PlanBase& plan, const LoraAdapter& adapter,
                                bool holds_shared) {
  const MoeSpec& spec = plan.spec;
  AdapterPart part{.shape = {.hidden_size = spec.hidden_size,
                             .intermediate_size = plan.part.shared_inner.size(),
                             .gated = is_gated(activation_or_routed(spec.shared.activation, spec)),
                             .dtype = common_dtype(adapter)},
                   .experts = {}};
  if (!holds_shared) return part;
  part.experts.resize(static_cast<size_t>(spec.shared.count));
  if (plan.part.shared_inner.size() == 0) return part;
  for (const LoraFactors& factors : adapter.factors) {
    if (factors.mlp != WeightMlp::kShared) continue;
    matrix_of(part.experts[static_cast<size_t>(factors.expert)], factors.matrix) =
        own_factors(factors, plan.part.shared_inner);
  }
  return part;
}

experts::ExpertAdapter slice_of_adapter(const experts::ExpertAdapter& expert,
                                        const TensorSlice& slice) {
  return {.gate = slice_of(expert.gate, false, slice),
          .up = slice_of(expert.up, false, slice),
          .down = slice_of(expert.down, true, slice)};
}

}  // namespace conclave::inline v0

#include "layer/cuda/mlp_source.h"

#include "core/row_stride.h"
#include "core/weight_types.h"
#include "experts/cuda/factor_planes.h"
#include "layer/cuda/row_format.h"

namespace conclave::inline v0 {
namespace {

// The tensor map interleaves gate and up rows in groups of 8: a partial group at the very end would
// reach beyond the caller's memory.
constexpr int64_t kRowGroup = 8;

CodeForms forms_of(const CudaMlpPlan& part) {
  CodeForms forms{.floats = false, .factors = false};
  for (const AdapterRung& rung : part.adapters) {
    (rung.row->reads_factors ? forms.factors : forms.floats) = true;
  }
  for (const experts::LadderRung& rung : part.ladder) {
    for (const experts::DeviceKernelRow* row : {rung.row, rung.skewed_row}) {
      if (row == nullptr) continue;
      (row->reads_factors ? forms.factors : forms.floats) = true;
      forms.near_scales |= row->decodes_lanes;
    }
  }
  return forms;
}

MlpSource every_row_source(const CudaPlan& plan, const CudaMlpPlan& part, WeightMlp kind,
                           const TensorSlice& inner) {
  MlpSource mlp{.problem = part.problem,
                .experts = {},
                .adds_down_bias = plan.part.adds_down_bias,
                .forms = forms_of(part)};
  for (int64_t expert = 0; expert < part.problem.num_local_experts; ++expert) {
    mlp.experts.push_back({.mlp = kind,
                           .expert = static_cast<int32_t>(expert),
                           .inner = inner,
                           .has_bias = part.problem.has_bias,
                           .has_down_bias = part.problem.has_bias,
                           .place = expert});
  }
  return mlp;
}

InPlaceMatrix place_of(const ConstTensorView& view) {
  return {.data = static_cast<const std::byte*>(view.data), .stride = row_stride(view)};
}

bool lies_at(const ConstTensorView& view, const std::byte* place, int64_t stride) {
  const InPlaceMatrix own = place_of(view);
  return own.data == place && own.stride == stride;
}

}  // namespace

MlpSource routed_source(const CudaPlan& plan, std::span<const int32_t> places) {
  MlpSource mlp{.problem = plan.routed.problem,
                .experts = {},
                .adds_down_bias = plan.part.adds_down_bias,
                .forms = forms_of(plan.routed),
                .room = plan.part.num_places() + plan.fused.slots()};
  // One launch reads what the streamed kernels read.
  mlp.forms.floats |= plan.decode_row != nullptr && !mlp.forms.factors;
  for (size_t place = 0; place < places.size(); ++place) {
    if (places[place] < 0) continue;
    mlp.experts.push_back({.mlp = WeightMlp::kRouted,
                           .expert = places[place],
                           .inner = plan.part.inner,
                           .has_bias = plan.spec.has_bias,
                           .has_down_bias = plan.spec.has_bias,
                           .place = static_cast<int64_t>(place)});
  }
  const int64_t width = plan.part.inner.size();
  for (int32_t slot = 0; slot < plan.fused.slots(); ++slot) {
    const int32_t slice = slot % plan.fused.slices;
    const int64_t begin = plan.part.shared_inner.begin + slice * width;
    mlp.experts.push_back({.mlp = WeightMlp::kShared,
                           .expert = slot / plan.fused.slices,
                           .inner = {.begin = begin, .end = begin + width},
                           .has_bias = plan.spec.shared.has_bias,
                           .has_down_bias = plan.spec.shared.has_bias && slice == 0,
                           .place = plan.part.num_places() + slot});
  }
  return mlp;
}

MlpSource routed_source(const CudaPlan& plan) {
  return routed_source(plan, plan.part.local_experts);
}

MlpSource shared_source(const CudaPlan& plan) {
  return every_row_source(plan, *plan.shared, WeightMlp::kShared, plan.part.shared_inner);
}
MlpSource residual_source(const CudaPlan& plan) {
  return every_row_source(plan, *plan.residual, WeightMlp::kResidual, plan.part.residual_inner);
}

Support find_layout(const MlpSource& mlp, const WeightSource& source, InPlaceLayout& layout) {
  if (source.memory() == MemoryKind::kHost) return Support::no("the weights are in host memory");
  if (mlp.experts.empty()) return Support::no("there are no experts");
  if (mlp.places() != mlp.count()) {
    return Support::no("spare places are memory of the layer's own");
  }
  const experts::ExpertsProblem& problem = mlp.problem;
  if (problem.ordered.gate_up != 0) return Support::no("columns have an order");
  if (experts::code_order(problem) != experts::CodeOrder::kStored) {
    return Support::no("codes lie in another order on a device");
  }
  const LocalExpert& first_expert = mlp.experts.front();
  const WeightId up_id = first_expert.id(WeightMatrix::kUp);
  const WeightId down_id = first_expert.id(WeightMatrix::kDown);
  for (const LocalExpert& local : mlp.experts) {
    if (local.mlp != first_expert.mlp)
      return Support::no("shared experts run with the routed ones");
    if (local.inner.size() != source.describe(down_id).cols) {
      return Support::no("only a slice of the columns is used");
    }
  }
  if (problem.intermediate_size % kRowGroup != 0) {
    return Support::no("the intermediate size is no multiple of 8");
  }
  const DType dtype = problem.weight_dtype;
  const WeightId first_id = problem.activation.gated ? first_expert.id(WeightMatrix::kGate) : up_id;
  const ConstTensorView first = source.view(first_id, first_expert.expert);
  const ConstTensorView down = source.view(down_id, first_expert.expert);
  if (first.empty() || down.empty()) return Support::no("a matrix has no view");
  layout = {.gate_up = place_of(first), .down = place_of(down)};
  const auto is_aligned = [&](const InPlaceMatrix& matrix) {
    return reinterpret_cast<uintptr_t>(matrix.data) % kRowAlignmentBytes == 0 &&
           packed_bytes(dtype, matrix.stride) % kRowAlignmentBytes == 0;
  };
  if (!is_aligned(layout.gate_up) || !is_aligned(layout.down)) {
    return Support::no("rows do not begin at multiples of 16 bytes");
  }
  const int64_t half_bytes = packed_bytes(dtype, problem.intermediate_size * layout.gate_up.stride);
  const int64_t down_bytes = packed_bytes(dtype, problem.hidden_size * layout.down.stride);
  for (size_t i = 0; i < mlp.experts.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const std::byte* const place = layout.gate_up.data + index * mlp.halves() * half_bytes;
    const int32_t expert = mlp.experts[i].expert;
    const bool good = lies_at(source.view(first_id, expert), place, layout.gate_up.stride) &&
                      lies_at(source.view(up_id, expert), place + (mlp.halves() - 1) * half_bytes,
                              layout.gate_up.stride) &&
                      lies_at(source.view(down_id, expert), layout.down.data + index * down_bytes,
                              layout.down.stride);
    if (!good) return Support::no("gate, up and experts do not follow each other");
  }
  return Support::yes();
}

}  // namespace conclave::inline v0

#include "layer/stages/cuda/finish.h"

#include "dispatch/cuda/combine.h"
#include "dispatch/cuda/sum_rows.h"
#include "gemm/cuda/gate_product.h"
#include "layer/cuda/launch_tables.h"
#include "layer/cuda/row_format.h"
#include "layer/stages/cuda/factors.h"
#include "layer/stages/cuda/prepare_rows.h"

namespace conclave::inline v0 {
namespace {

// The sums that the down product made, in place of rows of slots.
dispatch::DeviceCombineArgs ready_sums(const CudaCall& call, const CudaRouting& routing) {
  const experts::RowSums sums = routed_sums(call);
  return {.num_tokens = call.count,
          .live_tokens = routing.live_tokens,
          .routed_rows = sums.rows,
          .routed_row_stride = sums.stride,
          .hidden_size = call.plan.routed.problem.hidden_size,
          .padding_mask = routing.padding_mask};
}

// The weighted sum over the routed slots, [count, W].
dispatch::DeviceCombineArgs slot_sums(const CudaCall& call, const CudaRouting& routing,
                                      RoutedRows rows) {
  if (rows == RoutedRows::kAreSums) return ready_sums(call, routing);
  const CudaPlan& plan = call.plan;
  const bool weighted = plan.spec.weight_on == WeightOn::kOutput;
  return {.expert_rows = call.slice<void>(call.slices.routed.output),
          .expert_dtype = plan.routed.row_dtype,
          .expert_row_stride = plan.routed.row_stride,
          .topk_ids = routing.topk_ids,
          .topk_weights = weighted ? routing.topk_weights : nullptr,
          .local_expert = call.weights.local_expert.as<int32_t>(),
          .num_experts = plan.num_ids(),
          .num_tokens = call.count,
          .live_tokens = routing.live_tokens,
          .top_k = plan.num_slots(),
          .shared_slots = plan.fused.slots(),
          .hidden_size = plan.routed.problem.hidden_size,
          .padding_mask = routing.padding_mask};
}

// The sums over slots, projected up: [count, H] float32.
void enqueue_projection(const CudaCall& call, const CudaRouting& routing, RoutedRows rows) {
  const MoeSpec& spec = call.plan.spec;
  const LatentSpec& latent = spec.latent;
  auto* const sums = call.slice<float>(call.slices.latent);
  dispatch::DeviceCombineArgs combine = slot_sums(call, routing, rows);
  combine.out = sums;
  combine.out_dtype = DType::kF32;
  combine.out_stride = latent.size;
  dispatch::device_combine(combine, call.stream);
  if (latent.has_norm) {
    rms_norm_rows(sums, call.count, latent.size, call.weights.latent_norm.as<float>(),
                  latent.norm_epsilon, call.stream);
  }
  const DType dtype = call.weights.latent_up_dtype;
  gemm::device_gate_product({.rows = sums,
                             .rows_dtype = DType::kF32,
                             .rows_stride = latent.size,
                             .num_tokens = call.count,
                             .hidden_size = latent.size,
                             .weights = call.weights.latent_up.as(),
                             .weights_dtype = dtype,
                             .weights_stride = padded_row(latent.size, dtype),
                             .num_logits = spec.hidden_size,
                             .logits = call.slice<float>(call.slices.projected)},
                            gate_kernel(call.plan.gates.latent_up, call.count), call.stream);
}

// The projected rows, in place of rows of slots.
dispatch::DeviceCombineArgs projected_sums(const CudaCall& call, const CudaRouting& routing) {
  const int64_t hidden = call.plan.spec.hidden_size;
  return {.num_tokens = call.count,
          .live_tokens = routing.live_tokens,
          .routed_rows = call.slice<float>(call.slices.projected),
          .routed_row_stride = hidden,
          .hidden_size = hidden,
          .padding_mask = routing.padding_mask};
}

// Adds the terms that only one rank adds to the routed sum.
void add_rest(const CudaCall& call, const CudaRouting& routing,
              dispatch::DeviceCombineArgs& combine) {
  if (!call.plan.part.adds_rest) return;
  const ConstTensorView& hidden = call.args.hidden;
  combine.identity = routing.identity;
  combine.hidden = chunk_data(call, hidden);
  combine.hidden_dtype = hidden.dtype;
  combine.hidden_stride = stride_of_rows(hidden);
  combine.output_bias = call.weights.output_bias.as<float>();
}

void mix(const CudaCall& call, dispatch::DeviceCombineArgs& combine) {
  const SharedMode mode = call.plan.spec.shared.mode;
  if (mode == SharedMode::kAverage) combine.routed_factor = 0.5F;
  if (mode == SharedMode::kSoftmaxMix) {
    combine.routed_factors = call.slice<float>(call.slices.mix);
  }
}

void add_other_rows(const CudaCall& call, dispatch::DeviceCombineArgs& combine) {
  const CudaPlan& plan = call.plan;
  if (plan.shared) {
    combine.shared_rows = call.slice<void>(call.slices.shared.output);
    combine.shared_dtype = plan.shared->row_dtype;
    combine.shared_row_stride = plan.shared->row_stride;
    combine.num_shared = static_cast<int32_t>(plan.shared->problem.num_local_experts);
    combine.shared_factor = shared_factors(call);
    combine.shared_constant = shared_constant(call);
  }
  if (plan.residual) {
    combine.residual_rows = call.slice<void>(call.slices.residual.output);
    combine.residual_dtype = plan.residual->row_dtype;
    combine.residual_row_stride = plan.residual->row_stride;
  }
}

void set_outputs(const CudaCall& call, dispatch::DeviceCombineArgs& combine) {
  const ForwardArgs& args = call.args;
  combine.out = chunk_data(call, args.out);
  combine.out_dtype = args.out.dtype;
  combine.out_stride = stride_of_rows(args.out);
  if (args.shared_out.empty()) return;
  combine.shared_out = chunk_data(call, args.shared_out);
  combine.shared_out_dtype = args.shared_out.dtype;
  combine.shared_out_stride = stride_of_rows(args.shared_out);
}

}  // namespace

void combine_and_finish(const CudaCall& call, const CudaRouting& routing, RoutedRows rows) {
  const bool projects = call.plan.spec.latent.size != 0;
  if (projects) enqueue_projection(call, routing, rows);
  dispatch::DeviceCombineArgs combine =
      projects ? projected_sums(call, routing) : slot_sums(call, routing, rows);
  combine.output_scale = static_cast<float>(call.plan.spec.output_scale);
  add_rest(call, routing, combine);
  mix(call, combine);
  add_other_rows(call, combine);
  set_outputs(call, combine);
  if (dispatch::only_rounds(combine)) {
    dispatch::round_sums(combine, call.stream);
  } else {
    dispatch::device_combine(combine, call.stream);
  }
}

}  // namespace conclave::inline v0

#include "layer/stages/cuda/finish.h"

#include "dispatch/cuda/combine.h"
#include "dispatch/cuda/sum_rows.h"
#include "gemm/cuda/gate_product.h"
#include "layer/cuda/launch_tables.h"
#include "layer/cuda/row_format.h"
#include "layer/stages/cuda/prepare_rows.h"
#include "layer/stages/cuda/rows.h"

namespace conclave::inline v0 {
namespace {

using enum CudaBuffer;

// The sums that the down product made, in place of rows of slots.
dispatch::DeviceCombineArgs ready_sums(const CudaChunk& chunk, const CudaRouting& routing) {
  const experts::RowSums sums = routed_sums(chunk);
  return {.num_tokens = chunk.count,
          .live_tokens = routing.live.tokens,
          .routed_rows = sums.rows,
          .routed_row_stride = sums.stride,
          .hidden_size = chunk.plan.routed.problem.hidden_size,
          .padding_mask = routing.live.padding_mask};
}

// The weighted sum over the routed slots, [count, W].
dispatch::DeviceCombineArgs slot_sums(const CudaChunk& chunk, const CudaRouting& routing,
                                      RoutedRows rows) {
  if (rows == RoutedRows::kAreSums) return ready_sums(chunk, routing);
  const CudaPlan& plan = chunk.plan;
  const bool weighted = plan.spec.weight_on == WeightOn::kOutput;
  return {.expert_rows = chunk.scratch.at<void>(kRoutedOutput),
          .expert_dtype = plan.routed.row_dtype,
          .expert_row_stride = plan.routed.row_stride,
          .topk_ids = routing.topk_ids,
          .topk_weights = weighted ? routing.topk_weights : nullptr,
          .local_expert = chunk.weights.local_expert.as<int32_t>(),
          .num_experts = plan.num_ids(),
          .num_tokens = chunk.count,
          .live_tokens = routing.live.tokens,
          .top_k = plan.num_slots(),
          .shared_slots = plan.fused.slots(),
          .hidden_size = plan.routed.problem.hidden_size,
          .padding_mask = routing.live.padding_mask};
}

// The sums over slots, projected up: [count, H] float32.
void enqueue_projection(const CudaChunk& chunk, const CudaRouting& routing, RoutedRows rows) {
  const MoeSpec& spec = chunk.plan.spec;
  const LatentSpec& latent = spec.latent;
  auto* const sums = chunk.scratch.at<float>(kLatent);
  dispatch::DeviceCombineArgs combine = slot_sums(chunk, routing, rows);
  combine.out = sums;
  combine.out_dtype = DType::kF32;
  combine.out_stride = latent.size;
  dispatch::device_combine(combine, chunk.stream);
  if (latent.has_norm) {
    rms_norm_rows(sums, chunk.count, latent.size, chunk.weights.latent_norm.as<float>(),
                  latent.norm_epsilon, chunk.stream);
  }
  const DType dtype = chunk.weights.latent_up_dtype;
  gemm::device_gate_product({.rows = sums,
                             .rows_dtype = DType::kF32,
                             .rows_stride = latent.size,
                             .num_tokens = chunk.count,
                             .hidden_size = latent.size,
                             .weights = chunk.weights.latent_up.as(),
                             .weights_dtype = dtype,
                             .weights_stride = padded_row(latent.size, dtype),
                             .num_logits = spec.hidden_size,
                             .logits = chunk.scratch.at<float>(kProjected)},
                            gate_kernel(chunk.plan.gates.latent_up, chunk.count), chunk.stream);
}

// The projected rows, in place of rows of slots.
dispatch::DeviceCombineArgs projected_sums(const CudaChunk& chunk, const CudaRouting& routing) {
  const int64_t hidden = chunk.plan.spec.hidden_size;
  return {.num_tokens = chunk.count,
          .live_tokens = routing.live.tokens,
          .routed_rows = chunk.scratch.at<float>(kProjected),
          .routed_row_stride = hidden,
          .hidden_size = hidden,
          .padding_mask = routing.live.padding_mask};
}

// Adds the terms that only one rank adds to the routed sum.
void add_rest(const CudaChunk& chunk, const CudaRouting& routing, const ConstTensorView& hidden,
              dispatch::DeviceCombineArgs& combine) {
  if (!chunk.plan.part.adds_rest) return;
  combine.identity = routing.identity;
  combine.hidden = hidden.data;
  combine.hidden_dtype = hidden.dtype;
  combine.hidden_stride = stride_of_rows(hidden);
  combine.output_bias = chunk.weights.output_bias.as<float>();
}

void add_other_rows(const CudaChunk& chunk, const CudaFactors& factors,
                    dispatch::DeviceCombineArgs& combine) {
  const CudaPlan& plan = chunk.plan;
  if (plan.shared) {
    combine.shared_rows = chunk.scratch.at<void>(kSharedOutput);
    combine.shared_dtype = plan.shared->row_dtype;
    combine.shared_row_stride = plan.shared->row_stride;
    combine.num_shared = static_cast<int32_t>(plan.shared->problem.num_local_experts);
    combine.shared_factor = factors.shared;
    combine.shared_constant = factors.shared_constant;
  }
  if (plan.residual) {
    combine.residual_rows = chunk.scratch.at<void>(kResidualOutput);
    combine.residual_dtype = plan.residual->row_dtype;
    combine.residual_row_stride = plan.residual->row_stride;
  }
}

void set_outputs(const TensorView& out, const TensorView& shared_out,
                 dispatch::DeviceCombineArgs& combine) {
  combine.out = out.data;
  combine.out_dtype = out.dtype;
  combine.out_stride = stride_of_rows(out);
  if (shared_out.empty()) return;
  combine.shared_out = shared_out.data;
  combine.shared_out_dtype = shared_out.dtype;
  combine.shared_out_stride = stride_of_rows(shared_out);
}

}  // namespace

void combine_and_finish(const CudaChunk& chunk, const CudaRouting& routing, const CudaTerms& terms,
                        const TensorView& out, const TensorView& shared_out) {
  const bool projects = chunk.plan.spec.latent.size != 0;
  if (projects) enqueue_projection(chunk, routing, terms.rows);
  dispatch::DeviceCombineArgs combine =
      projects ? projected_sums(chunk, routing) : slot_sums(chunk, routing, terms.rows);
  combine.output_scale = static_cast<float>(chunk.plan.spec.output_scale);
  combine.routed_factor = terms.factors.routed_constant;
  combine.routed_factors = terms.factors.routed;
  add_rest(chunk, routing, terms.hidden, combine);
  add_other_rows(chunk, terms.factors, combine);
  set_outputs(out, shared_out, combine);
  const bool has_sums = projects || terms.rows == RoutedRows::kAreSums;
  const bool call_adds = routing.live.padding_mask != nullptr || !shared_out.empty();
  if (chunk.plan.end.rounds_sums && has_sums && !call_adds) {
    dispatch::round_sums(combine, chunk.stream);
  } else {
    dispatch::device_combine(combine, chunk.stream);
  }
}

}  // namespace conclave::inline v0

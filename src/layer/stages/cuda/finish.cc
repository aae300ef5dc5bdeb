#include "layer/stages/cuda/finish.h"

#include "core/row_stride.h"
#include "dispatch/cuda/combine.h"
#include "dispatch/cuda/sum_rows.h"
#include "gemm/cuda/gate_product.h"
#include "layer/cuda/launch_tables.h"
#include "layer/cuda/row_format.h"
#include "layer/stages/cuda/prepare_rows.h"

namespace conclave::inline v0 {
namespace {

using enum CudaBuffer;

RoutedRows sums_in(float* rows, int64_t columns) {
  return {.form = RoutedRows::Form::kAreSums,
          .data = rows,
          .dtype = DType::kF32,
          .stride = columns,
          .columns = columns};
}

void add_slots(const CudaChunk& chunk, const CudaRouting& routing, const RoutedRows& rows,
               const RoutedRows& sums) {
  dispatch::DeviceCombineArgs combine = sum_of_slots(chunk, routing, rows);
  combine.out = sums.data;
  combine.out_dtype = sums.dtype;
  combine.out_stride = sums.stride;
  dispatch::device_combine(combine, chunk.stream);
}

RoutedRows project_up(const CudaChunk& chunk, const RoutedRows& sums) {
  const int64_t hidden = chunk.plan.spec.hidden_size;
  const CudaLayerWeight& up = chunk.weights.own[weights::kLatentUp];
  auto* const projected = chunk.scratch.at<float>(kProjected);
  gemm::device_gate_product({.rows = sums.data,
                             .rows_dtype = sums.dtype,
                             .rows_stride = sums.stride,
                             .num_tokens = chunk.count,
                             .hidden_size = sums.columns,
                             .weights = up.memory.as(),
                             .weights_dtype = up.dtype,
                             .weights_stride = padded_row(sums.columns, up.dtype),
                             .num_logits = hidden,
                             .logits = projected},
                            gate_kernel(chunk.plan.gates.latent_up, chunk.count), chunk.stream);
  return sums_in(projected, hidden);
}

// Adds the terms that only one rank adds to the routed sum.
void add_rest(const CudaChunk& chunk, const CudaRouting& routing, const ConstTensorView& hidden,
              dispatch::DeviceCombineArgs& combine) {
  if (!chunk.plan.part.adds_rest) return;
  combine.identity = routing.identity;
  combine.hidden = hidden.data;
  combine.hidden_dtype = hidden.dtype;
  combine.hidden_stride = row_stride(hidden);
  combine.output_bias = chunk.weights.floats(weights::kOutputBias);
}

void add_other_rows(const CudaChunk& chunk, const CudaTerms& terms,
                    dispatch::DeviceCombineArgs& combine) {
  if (terms.shared.data != nullptr) {
    combine.shared_rows = terms.shared.data;
    combine.shared_dtype = terms.shared.dtype;
    combine.shared_row_stride = terms.shared.stride;
    combine.num_shared = static_cast<int32_t>(chunk.plan.shared->problem.num_local_experts);
    combine.shared_factor = terms.factors.shared;
    combine.shared_constant = terms.factors.shared_constant;
  }
  if (terms.residual.data != nullptr) {
    combine.residual_rows = terms.residual.data;
    combine.residual_dtype = terms.residual.dtype;
    combine.residual_row_stride = terms.residual.stride;
  }
}

void set_outputs(const CudaOutputs& outputs, dispatch::DeviceCombineArgs& combine) {
  combine.out = outputs.out.data;
  combine.out_dtype = outputs.out.dtype;
  combine.out_stride = row_stride(outputs.out);
  if (outputs.shared.empty()) return;
  combine.shared_out = outputs.shared.data;
  combine.shared_out_dtype = outputs.shared.dtype;
  combine.shared_out_stride = row_stride(outputs.shared);
}

}  // namespace

dispatch::DeviceCombineArgs sum_of_slots(const CudaChunk& chunk, const CudaRouting& routing,
                                         const RoutedRows& rows) {
  dispatch::DeviceCombineArgs combine{.num_tokens = chunk.count,
                                      .live_tokens = routing.live.tokens,
                                      .hidden_size = rows.columns,
                                      .padding_mask = routing.live.padding_mask};
  if (rows.form == RoutedRows::Form::kAreSums) {
    combine.routed_rows = static_cast<const float*>(rows.data);
    combine.routed_row_stride = rows.stride;
    return combine;
  }
  const CudaPlan& plan = chunk.plan;
  const bool weighted = plan.spec.weight_on == WeightOn::kOutput;
  combine.expert_rows = rows.data;
  combine.expert_dtype = rows.dtype;
  combine.expert_row_stride = rows.stride;
  combine.topk_ids = routing.topk_ids;
  combine.topk_weights = weighted ? routing.topk_weights : nullptr;
  combine.local_expert = chunk.weights.local_expert.as<int32_t>();
  combine.num_experts = plan.num_ids();
  combine.top_k = plan.num_slots();
  combine.shared_slots = plan.fused.slots();
  return combine;
}

RoutedRows sum_slots(const CudaChunk& chunk, const CudaRouting& routing, const RoutedRows& rows) {
  const RoutedRows sums = sums_in(chunk.scratch.at<float>(kLatent), rows.columns);
  add_slots(chunk, routing, rows, sums);
  return sums;
}

RoutedRows expert_part(const CudaChunk& chunk, const CudaRouting& routing, const RoutedRows& rows) {
  const DType dtype = chunk.plan.part_dtype();
  if (rows.form == RoutedRows::Form::kAreSums && dtype == rows.dtype) return rows;
  const RoutedRows part{.form = RoutedRows::Form::kAreSums,
                        .data = chunk.scratch.at<void>(kExpertPart),
                        .dtype = dtype,
                        .stride = padded_row(rows.columns, dtype),
                        .columns = rows.columns};
  add_slots(chunk, routing, rows, part);
  return part;
}

void norm_sums(const CudaChunk& chunk, const RoutedRows& sums) {
  rms_norm_rows(static_cast<float*>(sums.data), chunk.count, sums.columns,
                chunk.weights.floats(weights::kLatentNorm), chunk.plan.spec.latent.norm_epsilon,
                chunk.stream);
}

dispatch::DeviceCombineArgs last_sum(const CudaChunk& chunk, const CudaRouting& routing,
                                     const RoutedRows& rows, const CudaTerms& terms) {
  const bool is_latent = chunk.plan.spec.latent.size != 0;
  dispatch::DeviceCombineArgs sum =
      sum_of_slots(chunk, routing, is_latent ? project_up(chunk, rows) : rows);
  sum.output_scale = static_cast<float>(chunk.plan.spec.output_scale);
  sum.routed_factor = terms.factors.routed_constant;
  sum.routed_factors = terms.factors.routed;
  add_rest(chunk, routing, terms.hidden, sum);
  add_other_rows(chunk, terms, sum);
  return sum;
}

void finish_sum(const CudaChunk& chunk, dispatch::DeviceCombineArgs sum,
                const CudaOutputs& outputs) {
  set_outputs(outputs, sum);
  const bool call_adds = sum.padding_mask != nullptr || !outputs.shared.empty();
  const bool is_made = sum.routed_rows != nullptr && sum.top_k == 0;
  if (chunk.plan.end.rounds_sums && is_made && !call_adds) {
    dispatch::round_sums(sum, chunk.stream);
  } else {
    dispatch::device_combine(sum, chunk.stream);
  }
}

}  // namespace conclave::inline v0

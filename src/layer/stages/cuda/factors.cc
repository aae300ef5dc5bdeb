#include "layer/stages/cuda/factors.h"

#include "core/row_stride.h"
#include "core/shared_facts.h"
#include "gemm/cuda/gate_product.h"
#include "layer/cuda/launch_tables.h"
#include "layer/cuda/row_format.h"
#include "layer/stages/cuda/prepare_rows.h"
#include "layer/stages/cuda/rows.h"
#include "routing/cuda/fused_slots.h"

namespace conclave::inline v0 {
namespace {

using enum CudaBuffer;

// A matrix W of few rows.
struct SmallGate {
  const CudaLayerWeight& weights;
  int64_t rows = 0;
  const float* bias = nullptr;
  const std::vector<gemm::GateRung>& kernels;
};

// logits = x W^T (+ bias).
void enqueue_gate(const CudaChunk& chunk, const ConstTensorView& hidden, const SmallGate& gate,
                  float* logits) {
  const int64_t columns = chunk.plan.spec.hidden_size;
  gemm::device_gate_product({.rows = hidden.data,
                             .rows_dtype = hidden.dtype,
                             .rows_stride = row_stride(hidden),
                             .num_tokens = chunk.count,
                             .hidden_size = columns,
                             .weights = gate.weights.memory.as(),
                             .weights_dtype = gate.weights.dtype,
                             .weights_stride = padded_row(columns, gate.weights.dtype),
                             .num_logits = gate.rows,
                             .bias = gate.bias,
                             .logits = logits},
                            gate_kernel(gate.kernels, chunk.count), chunk.stream);
}

// sigmoid(x . w); slots of fused experts keep the product and apply the sigmoid themselves.
CudaFactors enqueue_sigmoid(const CudaChunk& chunk, const ConstTensorView& hidden) {
  auto* const factor = chunk.scratch.at<float>(kSharedFactor);
  const CudaFactors factors{.shared = factor};
  const CudaLayerWeight& gate = chunk.weights.own[weights::kSharedExpertGate];
  if (gate.memory.empty()) return factors;
  enqueue_gate(chunk, hidden, {.weights = gate, .rows = 1, .kernels = chunk.plan.gates.shared_gate},
               factor);
  if (chunk.plan.fused.slots() == 0) sigmoid_in_place(factor, chunk.count, chunk.stream);
  return factors;
}

CudaFactors enqueue_mix(const CudaChunk& chunk, const ConstTensorView& hidden) {
  const CudaWeights& weights = chunk.weights;
  auto* const logits = chunk.scratch.at<float>(kMixLogits);
  auto* const routed = chunk.scratch.at<float>(kMix);
  auto* const shared = chunk.scratch.at<float>(kSharedFactor);
  enqueue_gate(chunk, hidden,
               {.weights = weights.own[weights::kMixGate],
                .rows = 2,
                .bias = weights.floats(weights::kMixGateBias),
                .kernels = chunk.plan.gates.mix},
               logits);
  mix_factors(logits, chunk.count, routed, shared, chunk.stream);
  return {.shared = shared, .routed = routed};
}

CudaFactors enqueue_fused_slots(const CudaChunk& chunk, const CudaGiven& given,
                                const CudaCaptures& captures) {
  const MoeSpec& spec = chunk.plan.spec;
  auto* const weights = chunk.scratch.at<float>(kSharedFactor);
  routing::DeviceFusedSlots slots{.num_tokens = chunk.count,
                                  .live_tokens = given.live.tokens,
                                  .padding_mask = given.live.padding_mask,
                                  .top_k = static_cast<int32_t>(spec.top_k),
                                  .num_experts = static_cast<int32_t>(spec.num_experts),
                                  .num_shared = static_cast<int32_t>(spec.shared.count),
                                  .slot_weight = static_cast<float>(spec.shared.slot_weight),
                                  .shared_weights = weights,
                                  .captured_ids = capture<int32_t>(captures.ids),
                                  .captured_ids_stride = capture_stride(captures.ids),
                                  .captured_weights = capture<float>(captures.weights),
                                  .captured_weights_stride = capture_stride(captures.weights),
                                  .skipped_ids = &chunk.counters->skipped_ids};
  if (!given.topk_ids.empty()) {
    slots.given_ids = given.topk_ids.data;
    slots.ids_dtype = given.topk_ids.dtype;
    slots.ids_stride = row_stride(given.topk_ids);
  }
  if (!given.topk_weights.empty()) {
    slots.given_weights = given.topk_weights.data;
    slots.weights_dtype = given.topk_weights.dtype;
    slots.weights_stride = row_stride(given.topk_weights);
  }
  routing::device_fused_slots(slots, chunk.stream);
  return {.shared = weights};
}

}  // namespace

CudaFactors enqueue_factors(const CudaChunk& chunk, const ConstTensorView& hidden,
                            const CudaGiven& given, const CudaCaptures& captures) {
  switch (shared_facts(chunk.plan.spec).factor) {
    case SharedFactor::kSigmoid:
      return enqueue_sigmoid(chunk, hidden);
    case SharedFactor::kSoftmax:
      return enqueue_mix(chunk, hidden);
    case SharedFactor::kSlot:
      return enqueue_fused_slots(chunk, given, captures);
    case SharedFactor::kHalf:
      return {.shared_constant = 0.5F, .routed_constant = 0.5F};
    case SharedFactor::kRouter:
    case SharedFactor::kNone:
      break;
  }
  return {};
}

SharedSlots shared_slots(const CudaPlan& plan, const CudaFactors& factors) {
  if (plan.fused.slots() == 0) return {};
  return {.count = plan.fused.slots(),
          .first_id = static_cast<int32_t>(plan.spec.num_experts),
          .factor = factors.shared,
          .constant = factors.shared_constant,
          .factors = plan.fused.count,
          .slices = plan.fused.slices,
          .is_logit = shared_facts(plan.spec).has_sigmoid_gate()};
}

}  // namespace conclave::inline v0

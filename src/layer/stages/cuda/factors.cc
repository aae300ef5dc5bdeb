#include "layer/stages/cuda/factors.h"

#include "gemm/cuda/gate_product.h"
#include "layer/cuda/launch_tables.h"
#include "layer/cuda/row_format.h"
#include "layer/stages/cuda/prepare_rows.h"
#include "layer/stages/cuda/route.h"
#include "routing/cuda/fused_slots.h"

namespace conclave::inline v0 {
namespace {

// A matrix W of few rows.
struct SmallGate {
  const DeviceMemory& weights;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  const float* bias = nullptr;
  const std::vector<gemm::GateRung>& kernels;
};

// logits = x W^T (+ bias).
void enqueue_gate(const CudaCall& call, const SmallGate& gate, float* logits) {
  const ConstTensorView& hidden = call.args.hidden;
  const int64_t columns = call.plan.spec.hidden_size;
  gemm::device_gate_product({.rows = chunk_data(call, hidden),
                             .rows_dtype = hidden.dtype,
                             .rows_stride = stride_of_rows(hidden),
                             .num_tokens = call.count,
                             .hidden_size = columns,
                             .weights = gate.weights.as(),
                             .weights_dtype = gate.dtype,
                             .weights_stride = padded_row(columns, gate.dtype),
                             .num_logits = gate.rows,
                             .bias = gate.bias,
                             .logits = logits},
                            gate_kernel(gate.kernels, call.count), call.stream);
}

bool is_fused(const CudaCall& call) { return call.plan.fused.slots() > 0; }

// sigmoid(x . w); slots of fused experts keep the product and apply the sigmoid themselves.
void enqueue_sigmoid(const CudaCall& call) {
  if (call.weights.shared_gate.empty()) return;
  auto* const factor = call.slice<float>(call.slices.shared_factor);
  enqueue_gate(call,
               {.weights = call.weights.shared_gate,
                .dtype = call.weights.shared_gate_dtype,
                .rows = 1,
                .kernels = call.plan.gates.shared_gate},
               factor);
  if (!is_fused(call)) sigmoid_in_place(factor, call.count, call.stream);
}

void enqueue_mix(const CudaCall& call) {
  const CudaWeights& weights = call.weights;
  auto* const logits = call.slice<float>(call.slices.mix_logits);
  enqueue_gate(call,
               {.weights = weights.mix_gate,
                .dtype = weights.mix_gate_dtype,
                .rows = 2,
                .bias = weights.mix_gate_bias.as<float>(),
                .kernels = call.plan.gates.mix},
               logits);
  mix_factors(logits, call.count, call.slice<float>(call.slices.mix),
              call.slice<float>(call.slices.shared_factor), call.stream);
}

void enqueue_fused_slots(const CudaCall& call, const int64_t* live_tokens,
                         const bool* padding_mask) {
  const ForwardArgs& args = call.args;
  const MoeSpec& spec = call.plan.spec;
  routing::DeviceFusedSlots slots{.num_tokens = call.count,
                                  .live_tokens = live_tokens,
                                  .padding_mask = padding_mask,
                                  .top_k = static_cast<int32_t>(spec.top_k),
                                  .num_experts = static_cast<int32_t>(spec.num_experts),
                                  .num_shared = static_cast<int32_t>(spec.shared.count),
                                  .slot_weight = static_cast<float>(spec.shared.slot_weight),
                                  .shared_weights = call.slice<float>(call.slices.shared_factor),
                                  .skipped_ids = &call.counters->skipped_ids};
  if (!args.topk_ids.empty()) {
    slots.given_ids = chunk_data(call, args.topk_ids);
    slots.ids_dtype = args.topk_ids.dtype;
    slots.ids_stride = stride_of_rows(args.topk_ids);
  }
  if (!args.topk_weights.empty()) {
    slots.given_weights = chunk_data(call, args.topk_weights);
    slots.weights_dtype = args.topk_weights.dtype;
    slots.weights_stride = stride_of_rows(args.topk_weights);
  }
  if (!args.captured_ids.empty()) {
    slots.captured_ids = static_cast<int32_t*>(chunk_data(call, args.captured_ids));
    slots.captured_ids_stride = stride_of_rows(args.captured_ids);
  }
  if (!args.captured_weights.empty()) {
    slots.captured_weights = static_cast<float*>(chunk_data(call, args.captured_weights));
    slots.captured_weights_stride = stride_of_rows(args.captured_weights);
  }
  routing::device_fused_slots(slots, call.stream);
}

bool has_factors(SharedMode mode) {
  return mode == SharedMode::kSigmoidGate || mode == SharedMode::kSoftmaxMix ||
         mode == SharedMode::kRouterWeight || mode == SharedMode::kFusedSlots;
}

}  // namespace

void enqueue_factors(const CudaCall& call, const int64_t* live_tokens, const bool* padding_mask) {
  switch (call.plan.spec.shared.mode) {
    case SharedMode::kSigmoidGate:
      return enqueue_sigmoid(call);
    case SharedMode::kSoftmaxMix:
      return enqueue_mix(call);
    case SharedMode::kFusedSlots:
      return enqueue_fused_slots(call, live_tokens, padding_mask);
    case SharedMode::kNone:
    case SharedMode::kAdd:
    case SharedMode::kAverage:
    case SharedMode::kRouterWeight:
      return;
  }
}

const float* shared_factors(const CudaCall& call) {
  return has_factors(call.plan.spec.shared.mode) ? call.slice<float>(call.slices.shared_factor)
                                                 : nullptr;
}

float shared_constant(const CudaCall& call) {
  return call.plan.spec.shared.mode == SharedMode::kAverage ? 0.5F : 1.0F;
}

SharedSlots shared_slots(const CudaCall& call) {
  if (!is_fused(call)) return {};
  const CudaPlan& plan = call.plan;
  return {.count = plan.fused.slots(),
          .first_id = static_cast<int32_t>(plan.spec.num_experts),
          .factor = shared_factors(call),
          .constant = shared_constant(call),
          .factors = plan.fused.count,
          .slices = plan.fused.slices,
          .is_logit = plan.spec.shared.mode == SharedMode::kSigmoidGate};
}

}  // namespace conclave::inline v0

// Routing on CUDA: turns the caller's ids, logits or hidden rows into ids and weights, and groups
// rows by expert.
#pragma once

#include "dispatch/cuda/group.h"
#include "layer/stages/cuda/call_limits.h"
#include "layer/stages/cuda/chunk.h"

#include <cstdint>
#include <optional>
#include <span>

namespace conclave::inline v0 {

// The rows of a chunk that count, on the device.
struct LiveRows {
  const int64_t* tokens = nullptr;     // [1], or null
  const bool* padding_mask = nullptr;  // [T], or null
};

// The caller's routing of a chunk; tensors are empty where none was given.
struct CudaGiven {
  ConstTensorView topk_ids;
  ConstTensorView topk_weights;
  ConstTensorView token_ids;
  LiveRows live;
  CudaLimits limits = {};
};
// The tensors for the routing that the caller wants; empty where it wants none.
struct CudaCaptures {
  TensorView logits;
  TensorView ids;
  TensorView weights;
  std::span<int64_t> expert_load;
};

// [T, logits] of any float type; no data where the router reads none.
struct CudaLogits {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t stride = 0;
};

// The factors of a chunk in the sums of its tokens, on the device.
struct CudaFactors {
  // Factors of the rows that shared experts make: [T, S], or null: the constant.
  const float* shared = nullptr;
  float shared_constant = 1;
  // Factors of the routed part: [T], or null: the constant.
  const float* routed = nullptr;
  float routed_constant = 1;
};

// The routing of a chunk, on the device.
struct CudaRouting {
  const int32_t* topk_ids = nullptr;    // [T, slots]; negative: no expert. Physical experts if
                                        // some are replicas; shared ones in the last slots
  const float* topk_weights = nullptr;  // [T, slots]
  const float* identity = nullptr;      // [T] summed weights of zero experts, or null
  LiveRows live;
  CudaFactors factors;     // those given, or the router's own
  GroupedRows groups;      // filled if grouping was requested
  bool is_checked = true;  // false: the caller's own, also without slots of shared experts
};

// Makes the live-token count of a call, or null, that of the chunk. May enqueue a launch.
LiveRows live_rows(const CudaChunk& chunk, const int64_t* of_call, const bool* padding_mask);

// The caller's logits, or the product of the gate with `gate_rows` if the router or a capture needs
// it. Fills the capture.
CudaLogits make_logits(const CudaChunk& chunk, const ConstTensorView& router_logits,
                       const ConstTensorView& gate_rows, const TensorView& captured);

// The caller's own ids and weights, if the single launch can read them in place: dense int32 and
// float32, neither masked nor captured, without zero experts. Enqueues nothing.
std::optional<CudaRouting> routing_in_place(const MoeSpec& spec, const CudaGiven& given,
                                            const CudaCaptures& captures,
                                            const CudaFactors& factors);

struct CudaRouteArgs {
  CudaLogits logits;
  const CudaGiven& given;
  const CudaCaptures& captures;
  const CudaFactors& factors;  // made before the router; it may replace them
  // How rows are grouped, or null; its ids and tokens need not be set.
  const dispatch::DeviceGroupArgs* group = nullptr;
};
// Enqueues the router and the checks of given ids that the call needs; fills the other captures.
CudaRouting enqueue_routing(const CudaChunk& chunk, const CudaRouteArgs& args);

// Enqueues the router alone and adds its choices to the sums of the call's budget. Captures nothing
// and counts nothing.
void enqueue_budget_pass(const CudaChunk& chunk, const CudaLogits& logits, const CudaGiven& given);

}  // namespace conclave::inline v0

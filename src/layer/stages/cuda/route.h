// Stage one on CUDA: turns the caller's routing, logits or hidden rows into ids and weights, and
// groups rows by expert.
#pragma once

#include "dispatch/cuda/group.h"
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

// The caller's tensors of a chunk; empty where none was given.
struct CudaRouteInputs {
  ConstTensorView gate_rows;  // [T, H]: what the gate reads
  ConstTensorView router_logits;
  ConstTensorView topk_ids;
  ConstTensorView topk_weights;
  ConstTensorView token_ids;
  LiveRows live;
};
// The tensors for the routing that the caller wants; empty where it wants none.
struct CudaCaptures {
  TensorView logits;
  TensorView ids;
  TensorView weights;
  std::span<int64_t> expert_load;
};

// The routing of a chunk, on the device.
struct CudaRouting {
  const int32_t* topk_ids = nullptr;    // [T, slots]; negative: no expert. Physical experts if
                                        // some are replicas; shared ones in the last slots
  const float* topk_weights = nullptr;  // [T, slots]
  const float* identity = nullptr;      // [T] summed weights of zero experts, or null
  LiveRows live;
  GroupedRows groups;  // filled if grouping was requested
};

// The live-token count of a call, or null, made that of the chunk. May enqueue a launch.
const int64_t* live_tokens(const CudaChunk& chunk, const int64_t* of_call);

// The caller's own ids and weights, if the decode kernel can read them in place: dense int32 and
// float32, neither masked nor captured, without zero experts. Enqueues nothing; the decode kernel
// checks the ids.
std::optional<CudaRouting> routing_in_place(const MoeSpec& spec, const CudaRouteInputs& inputs,
                                            const CudaCaptures& captures);

// Enqueues the gate product, router and checks of given ids that the call needs; fills the
// captures. `shared` are the slots of fused shared experts. `group`, if given, says how rows are
// grouped; its ids and tokens need not be set.
CudaRouting enqueue_routing(const CudaChunk& chunk, const CudaRouteInputs& inputs,
                            const CudaCaptures& captures, const SharedSlots& shared,
                            const dispatch::DeviceGroupArgs* group);

}  // namespace conclave::inline v0

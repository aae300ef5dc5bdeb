// Stage one on CUDA: turns the caller's routing, logits or hidden rows into ids and weights, and
// groups rows by expert.
#pragma once

#include "dispatch/cuda/group.h"
#include "layer/stages/cuda/chunk.h"

#include <cstdint>
#include <optional>

namespace conclave::inline v0 {

// The routing of a chunk, on the device.
struct CudaRouting {
  const int32_t* topk_ids = nullptr;     // [T, slots]; negative: no expert. Physical experts if
                                         // some are replicas; shared ones in the last slots
  const float* topk_weights = nullptr;   // [T, slots]
  const float* identity = nullptr;       // [T] summed weights of zero experts, or null
  const int64_t* live_tokens = nullptr;  // [1], or null
  const bool* padding_mask = nullptr;    // [T], or null
  GroupedRows groups;                    // filled if grouping was requested
};

// The caller's own ids and weights, if the decode kernel can read them in place: dense int32 and
// float32, neither masked nor captured, without zero experts. Enqueues only the factors of shared
// experts; the decode kernel checks the ids.
std::optional<CudaRouting> routing_in_place(const CudaCall& call);

// Enqueues the gate product, router and checks of given ids that the call needs, and the factors of
// shared experts; fills the captures. `group`, if given, says how rows are grouped; its ids and
// tokens need not be set.
CudaRouting enqueue_routing(const CudaCall& call, const dispatch::DeviceGroupArgs* group);

// The rows of the call's chunk in one of its tensors.
inline const void* chunk_data(const CudaCall& call, const ConstTensorView& view) {
  const int64_t columns = view.shape.rank() == 2 ? view.shape[1] : 1;
  const int64_t stride = view.row_stride != 0 ? view.row_stride : columns;
  return static_cast<const std::byte*>(view.data) + call.begin * stride * byte_size(view.dtype);
}
inline void* chunk_data(const CudaCall& call, const TensorView& view) {
  return const_cast<void*>(chunk_data(call, ConstTensorView(view)));
}
inline int64_t stride_of_rows(const ConstTensorView& view) {
  return view.row_stride != 0 ? view.row_stride : view.shape[1];
}

}  // namespace conclave::inline v0

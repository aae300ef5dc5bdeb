// Sanitises one token's ids and weights with one warp, one slot per lane, as
// layer/stages/given_routing.cc.
#pragma once

#include "cuda/device/shared_slot.cuh"
#include "cuda/device/vector16.cuh"
#include "dispatch/cuda/sanitize_ids.h"

#include <cstdint>

namespace conclave::inline v0::dispatch::device {

__device__ __forceinline__ int64_t given_id(const DeviceSanitizeArgs& args, int64_t token,
                                            int32_t slot) {
  const int64_t at = token * args.ids_stride + slot;
  if (args.ids_dtype == DType::kI64) return static_cast<const int64_t*>(args.given_ids)[at];
  return static_cast<const int32_t*>(args.given_ids)[at];
}

__device__ __forceinline__ float given_weight(const DeviceSanitizeArgs& args, int64_t token,
                                              int32_t slot) {
  if (args.given_weights == nullptr) return 0;
  const int64_t at = token * args.weights_stride + slot;
  switch (args.weights_dtype) {
    case DType::kF32:
      return static_cast<const float*>(args.given_weights)[at];
    case DType::kF16:
      return cuda::device::widen(static_cast<const __half*>(args.given_weights)[at]);
    default:
      return cuda::device::widen(static_cast<const __nv_bfloat16*>(args.given_weights)[at]);
  }
}

struct GivenSlot {
  int32_t id = -1;
  float weight = 0;
};

// Element index of a slot in a capture; a stride of 0 means top_k.
__device__ __forceinline__ int64_t capture_at(int64_t stride, int32_t top_k, int64_t token,
                                              int32_t slot) {
  return token * (stride == 0 ? top_k : stride) + slot;
}

__device__ __forceinline__ void store_slot(const DeviceSanitizeArgs& args, int64_t token,
                                           int32_t index, const GivenSlot& slot) {
  const int64_t at = token * (args.top_k + args.shared.count) + index;
  if (args.topk_ids != nullptr) args.topk_ids[at] = slot.id < args.num_experts ? slot.id : -1;
  if (args.topk_weights != nullptr) args.topk_weights[at] = slot.weight;
  if (args.captured_ids != nullptr) {
    args.captured_ids[capture_at(args.captured_ids_stride, args.top_k, token, index)] = slot.id;
  }
  if (args.captured_weights != nullptr) {
    args.captured_weights[capture_at(args.captured_weights_stride, args.top_k, token, index)] =
        slot.weight;
  }
}

// Stores the slots behind the given ones. Runs on a whole warp.
__device__ __forceinline__ void store_shared_slots(const DeviceSanitizeArgs& args, int64_t token,
                                                   bool counts) {
  for (auto i = static_cast<int32_t>(threadIdx.x % 32); i < args.shared.count; i += 32) {
    cuda::device::SharedSlot slot{-1, 0};
    if (counts) slot = cuda::device::shared_slot(args.shared, token, i);
    const int64_t at = token * (args.top_k + args.shared.count) + args.top_k + i;
    if (args.topk_ids != nullptr) args.topk_ids[at] = slot.id;
    if (args.topk_weights != nullptr) args.topk_weights[at] = slot.weight;
  }
}

// Runs on a whole warp, which adds to the counter at most once.
__device__ __forceinline__ void sanitize_token(const DeviceSanitizeArgs& args, int64_t token) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const bool counts = (args.live_tokens == nullptr || token < *args.live_tokens) &&
                      (args.padding_mask == nullptr || args.padding_mask[token]);
  float identity = 0;
  int32_t skipped = 0;
  for (int32_t first = 0; first < args.top_k; first += 32) {
    const int32_t index = first + lane;
    GivenSlot slot;
    bool bad = false;
    if (counts && index < args.top_k) {
      const int64_t id = given_id(args, token, index);
      const bool valid = id >= 0 && id < int64_t{args.num_experts} + args.num_zero_experts;
      bad = !valid && id != -1;
      slot = {valid ? static_cast<int32_t>(id) : -1, given_weight(args, token, index)};
    }
    if (index < args.top_k) store_slot(args, token, index, slot);
    skipped += __popc(__ballot_sync(0xffffffffU, bad));
    uint32_t zeros = __ballot_sync(0xffffffffU, slot.id >= args.num_experts);
    for (; zeros != 0; zeros &= zeros - 1) {
      identity += __shfl_sync(0xffffffffU, slot.weight, __ffs(static_cast<int>(zeros)) - 1);
    }
  }
  store_shared_slots(args, token, counts);
  if (lane != 0) return;
  if (args.identity != nullptr) args.identity[token] = identity;
  if (skipped != 0 && args.skipped_ids != nullptr) {
    atomicAdd(reinterpret_cast<unsigned long long*>(args.skipped_ids),
              static_cast<unsigned long long>(skipped));
  }
}

}  // namespace conclave::inline v0::dispatch::device

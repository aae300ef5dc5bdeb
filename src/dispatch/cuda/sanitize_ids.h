// Converts the caller's ids and weights to the form that the device stages take, on the device.
#pragma once

#include "core/device_flow.h"
#include "dispatch/cuda/group.h"

#include "conclave/dtype.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::dispatch {

// An id in [0, E) is an expert, one in [E, E + Z) a zero expert; any other has no expert. Ids are
// compared in 64 bits, so that no int64 id becomes valid by truncation.
struct DeviceSanitizeArgs {
  const void* given_ids = nullptr;  // [T, ids_stride] kI32 or kI64
  DType ids_dtype = DType::kI32;
  int64_t ids_stride = 0;
  const void* given_weights = nullptr;  // [T, weights_stride] kF32, kF16 or kBF16; or null
  DType weights_dtype = DType::kF32;
  int64_t weights_stride = 0;
  int64_t num_tokens = 0;
  const int64_t* live_tokens = nullptr;  // device, or null; later rows get ids -1
  const bool* padding_mask = nullptr;    // [T], or null; false: ids -1, weights 0, not counted
  int32_t top_k = 0;
  int32_t num_experts = 0;            // E
  int32_t num_zero_experts = 0;       // Z
  SharedSlots shared = {};            // appended to topk_ids and topk_weights
  int32_t* topk_ids = nullptr;        // [T, k + shared] out: the expert, or -1; or null
  float* topk_weights = nullptr;      // [T, k + shared] out; null without given weights
  float* identity = nullptr;          // [T] out: weights of zero experts, in slot order; or null
  int32_t* captured_ids = nullptr;    // [T, k] out: with zero experts; or null. device_route takes
                                      // them as given_ids
  float* captured_weights = nullptr;  // [T, k] out, or null
  int64_t captured_ids_stride = 0;    // elements; 0: k
  int64_t captured_weights_stride = 0;
  uint64_t* skipped_ids = nullptr;  // device counter: ids without an expert, except -1; or null
};

// Enqueues one launch.
void device_sanitize_ids(const DeviceSanitizeArgs& args, CUstream_st* stream);

// Sanitises, then groups sanitize.topk_ids: in one launch if slots are few. group.topk_ids,
// num_tokens, live_tokens and top_k (with the shared slots) are taken from `sanitize` and need not
// be set.
GroupedRows device_sanitize_and_group(const DeviceSanitizeArgs& sanitize,
                                      const DeviceGroupArgs& group, CUstream_st* stream);

}  // namespace conclave::inline v0::dispatch

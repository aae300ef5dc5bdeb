// Weights of shared experts that are slots of the caller's routing.
#pragma once

#include "conclave/dtype.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::routing {

// Weights of SharedMode::kFusedSlots: those of the caller's slots k to k + S - 1, or slot_weight; 0
// if the slot names another expert than its own.
struct DeviceFusedSlots {
  const void* given_ids = nullptr;  // [T, ids_stride] of k + S columns kI32 or kI64, or null
  DType ids_dtype = DType::kI32;
  int64_t ids_stride = 0;
  const void* given_weights = nullptr;  // [T, weights_stride], or null
  DType weights_dtype = DType::kF32;
  int64_t weights_stride = 0;
  int64_t num_tokens = 0;
  const int64_t* live_tokens = nullptr;
  const bool* padding_mask = nullptr;
  int32_t top_k = 0;
  int32_t num_experts = 0;
  int32_t num_shared = 0;
  float slot_weight = 1;
  float* shared_weights = nullptr;  // [T, S] out
  int32_t* captured_ids = nullptr;  // columns k to k + S - 1 of [T, stride], or null
  int64_t captured_ids_stride = 0;
  float* captured_weights = nullptr;
  int64_t captured_weights_stride = 0;
  uint64_t* skipped_ids = nullptr;
};
void device_fused_slots(const DeviceFusedSlots& args, CUstream_st* stream);

}  // namespace conclave::inline v0::routing

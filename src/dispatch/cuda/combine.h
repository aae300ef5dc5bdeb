// Turns expert rows into output rows on the device: the weighted sum over slots 0 to k-1 in
// float32, the terms added to it, one rounding.
#pragma once

#include "conclave/dtype.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::dispatch {

// out[t] = round(a_t * (output_scale * (u_t + sum_s w_s y_s) + identity_t x_t + output_bias)
//                + sum_i b_ti z_i + r_t), in this order, left to right. The z are the rows of the
// last shared_slots of a token's top_k slots, then those of shared_rows. Null terms are left out.
struct DeviceCombineArgs {
  const void* expert_rows = nullptr;  // [T * k, expert_row_stride] kBF16, kF16 or kF32
  DType expert_dtype = DType::kBF16;
  int64_t expert_row_stride = 0;
  const int32_t* topk_ids = nullptr;      // as for device_group: slots of no expert are not read
  const float* topk_weights = nullptr;    // [T, k]; null: all 1 (the input was weighted)
  const int32_t* local_expert = nullptr;  // as for device_group
  int32_t num_experts = 0;
  int64_t num_tokens = 0;
  const int64_t* live_tokens = nullptr;  // device, or null
  int32_t top_k = 0;
  int32_t shared_slots = 0;
  const float* routed_rows = nullptr;  // u [T, routed_row_stride], or null
  int64_t routed_row_stride = 0;
  int64_t hidden_size = 0;
  float output_scale = 1;
  float routed_factor = 1;                // a, if routed_factors is null
  const float* routed_factors = nullptr;  // [T]
  const float* identity = nullptr;        // [T] summed weights of zero experts, or null
  const void* hidden = nullptr;           // [T, hidden_stride], read if `identity` is given
  DType hidden_dtype = DType::kBF16;
  int64_t hidden_stride = 0;
  const float* output_bias = nullptr;  // [H], or null
  const void* shared_rows = nullptr;   // [T * S, shared_row_stride]: S rows per token, or null
  DType shared_dtype = DType::kBF16;
  int64_t shared_row_stride = 0;
  int32_t num_shared = 0;                // S
  const float* shared_factor = nullptr;  // [T, S], or null: shared_constant; 0: the row is not read
  float shared_constant = 1;
  const void* residual_rows = nullptr;  // [T, residual_row_stride], or null
  DType residual_dtype = DType::kBF16;
  int64_t residual_row_stride = 0;
  const bool* padding_mask = nullptr;  // [T], or null; false: the row becomes 0
  void* out = nullptr;                 // [T, out_stride]
  DType out_dtype = DType::kBF16;
  int64_t out_stride = 0;
  void* shared_out = nullptr;  // or null; if given, takes the shared sum in place of out
  DType shared_out_dtype = DType::kBF16;
  int64_t shared_out_stride = 0;
};

void device_combine(const DeviceCombineArgs& args, CUstream_st* stream);

}  // namespace conclave::inline v0::dispatch

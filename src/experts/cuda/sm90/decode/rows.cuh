// Rows for the products of the decode kernel: read in any type, then rounded or quantised.
#pragma once

#include "experts/cuda/common/e4m3.cuh"
#include "experts/cuda/sm90/decode/decode.h"

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0::experts::decode {

// Reads an element of any type at any alignment.
inline __device__ __noinline__ float read_element(const void* row, DType dtype, int64_t column) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(row)[column];
    case DType::kF16:
      return __half2float(static_cast<const __half*>(row)[column]);
    default:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(row)[column]);
  }
}

// Widens eight 16-bit elements.
__device__ __forceinline__ void widen(const uint4& raw, bool is_half, float (&values)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (is_half) {
      __half2 pair;
      memcpy(&pair, &words[i], 4);
      const float2 both = __half22float2(pair);
      values[2 * i] = both.x;
      values[2 * i + 1] = both.y;
    } else {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000U);
    }
  }
}

template <class Rule, int kLanes>
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2)
    value = Rule::larger(value, __shfl_xor_sync(0xffffffffU, value, step));
  return value;
}

}  // namespace conclave::inline v0::experts::decode

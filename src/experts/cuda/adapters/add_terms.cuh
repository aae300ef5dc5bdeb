// Adds what adapters contribute to a thread's sums.
#pragma once

#include "experts/cuda/adapters/device_factors.h"

#include <cstdint>
#include <cuda_bf16.h>

namespace conclave::inline v0::experts::adapters {

// Eight neighbouring elements of a factor as float32.
__device__ __forceinline__ void load_eight(const void* factor, int64_t at, bool is_bf16,
                                           float (&values)[8]) {
  if (is_bf16) {
    const uint4 words =
        *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(factor) + at);
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = __uint_as_float(pairs[i] << 16);
      values[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000U);
    }
    return;
  }
  const auto* const floats = static_cast<const float*>(factor) + at;
  const float4 low = *reinterpret_cast<const float4*>(floats);
  const float4 high = *reinterpret_cast<const float4*>(floats + 4);
  values[0] = low.x;
  values[1] = low.y;
  values[2] = low.z;
  values[3] = low.w;
  values[4] = high.x;
  values[5] = high.y;
  values[6] = high.z;
  values[7] = high.w;
}

// Row `row` of half `half`'s B times the row's terms.
__device__ __forceinline__ float delta_of(const RowFactors& factors, int half, int64_t row,
                                          const float* terms) {
  const int32_t rank = factors.rank[half];
  const float* const own = terms + factors.first[half];
  float sum = 0;
#pragma unroll 1
  for (int32_t r = 0; r < rank; r += 8) {
    float b[8];
    float t[8];
    load_eight(factors.b[half], row * rank + r, factors.is_bf16 != 0, b);
    load_eight(own, r, false, t);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(b[i], t[i], sum);
  }
  return sum;
}

}  // namespace conclave::inline v0::experts::adapters

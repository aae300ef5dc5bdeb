// Arithmetic of e4m3 on the device: codes, scales and finished rows.
#pragma once

#include "core/float8.h"
#include "quant/code_quotient.h"

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

namespace conclave::inline v0::experts {

// Converts two values to e4m3 codes, rounded to nearest even and saturated at 448; NaN becomes
// 0x7F.
__device__ __forceinline__ uint32_t pack_e4m3(float low, float high) {
  uint16_t packed = 0;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

// Rounds a scale up to a power of two, at least 2^-126.
__device__ __forceinline__ float round_up_to_power_of_two(float scale) {
  const uint32_t bits = __float_as_uint(scale);
  const uint32_t exponent = (bits + 0x7FFFFF) & 0x7F800000;
  return __uint_as_float(exponent == 0 ? 0x00800000u : exponent);
}

// The scale of a row or group with this largest magnitude.
__device__ __forceinline__ float group_scale(float amax, bool power_of_two) {
  const float quotient = __fdiv_rn(amax, kLargestE4m3);
  const float scale = quotient > 0 ? quotient : 1.0F;
  return power_of_two ? round_up_to_power_of_two(scale) : scale;
}

// Finishes a sum of the down product that belongs to the only row of its token, step by step as
// combine does: it takes rounded rows, and its sums begin at 0.
__device__ __forceinline__ float finish_sum(float sum, float weight, float scale) {
  const float row = __bfloat162float(__float2bfloat16_rn(sum));
  return __fmul_rn(__fadd_rn(0.0F, __fmul_rn(weight, row)), scale);
}

}  // namespace conclave::inline v0::experts

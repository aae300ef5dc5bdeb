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
#if __CUDA_ARCH__ >= 890
  uint16_t packed = 0;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
#else
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
#endif
}

// Does the same with four values, the first in the lowest byte.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | (high << 16);
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

// A quantisation step, prepared for division: both operands are multiplied by `factor`, a power of
// two that gives the divisor a normal inverse.
struct Step {
  float scale;
  float factor;
  float divisor;
  float inverse;
};

// 1 / x for a normal x, within one unit in the last place.
__device__ __forceinline__ float fast_inverse(float x) {
  const float guess = __fdividef(1.0F, x);
  return fmaf(fmaf(-x, guess, 1.0F), guess, guess);
}

__device__ __forceinline__ Step make_step(float scale) {
  const float factor = scale < 0x1p-60F ? 0x1p80F : scale > 0x1p60F ? 0x1p-80F : 1.0F;
  const float divisor = scale * factor;
  return {scale, factor, divisor, fast_inverse(divisor)};
}

// The scale where amax is infinite, or so small that amax / 448 may not be normal.
inline __device__ __noinline__ float rare_scale(float amax) {
  const float scale = __fdiv_rn(amax, kLargestE4m3);
  return scale == 0 ? 1.0F : scale;
}
__device__ __forceinline__ float to_power_of_two(float scale) {
  if (!(scale < INFINITY)) return scale;
  const uint32_t bits = __float_as_uint(scale);
  const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffU) != 0 ? 1U : 0U);
  return __uint_as_float((exponent > 0 ? exponent : 1U) << 23);
}
// The same as group_scale with less code, which a launch of few microseconds has to fetch: no
// division where amax is neither very small nor infinite.
__device__ __forceinline__ float short_group_scale(float amax, bool power_of_two) {
  float scale = 1;
  if (amax > 0x1p-100F && amax < INFINITY) {
    constexpr float kInverse = 1.0F / kLargestE4m3;
    const float quotient = amax * kInverse;
    scale = fmaf(fmaf(-quotient, kLargestE4m3, amax), kInverse, quotient);
  } else if (amax != 0) {
    scale = rare_scale(amax);
  }
  return power_of_two && amax > 0 ? to_power_of_two(scale) : scale;
}

// x / scale, rounded correctly, and so with the code of quant::code_quotient. A constant scale may
// be too small for x: a quotient beyond float32 then becomes infinite, which saturates as a code,
// while an infinite x gives NaN.
template <bool kMayOverflow>
__device__ __forceinline__ float divide(float x, const Step& step) {
  const float dividend = x * step.factor;
  const float quotient = dividend * step.inverse;
  const float exact = fmaf(fmaf(-quotient, step.divisor, dividend), step.inverse, quotient);
  if constexpr (!kMayOverflow) return exact;
  return fabsf(quotient) > 1024.0F ? quotient + (x - x) : exact;
}

// Finishes a sum of the down product that belongs to the only row of its token, step by step as
// combine does: it takes rounded rows, and its sums begin at 0.
__device__ __forceinline__ float finish_sum(float sum, float weight, float scale) {
  const float row = __bfloat162float(__float2bfloat16_rn(sum));
  return __fmul_rn(__fadd_rn(0.0F, __fmul_rn(weight, row)), scale);
}

}  // namespace conclave::inline v0::experts

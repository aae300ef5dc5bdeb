// Rows for the products of the decode kernel: read in any type, then rounded or quantised.
#pragma once

#include "core/float8.h"
#include "experts/cuda/sm90/decode/decode.h"

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace conclave::inline v0::experts::decode {

// Reads an element of any type at any alignment.
__device__ __noinline__ float read_element(const void* row, DType dtype, int64_t column) {
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
__device__ __noinline__ float rare_scale(float amax) {
  const float scale = __fdiv_rn(amax, kLargestE4m3);
  return scale == 0 ? 1.0F : scale;
}
__device__ __forceinline__ float to_power_of_two(float scale) {
  if (!(scale < INFINITY)) return scale;
  const uint32_t bits = __float_as_uint(scale);
  const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffU) != 0 ? 1U : 0U);
  return __uint_as_float((exponent > 0 ? exponent : 1U) << 23);
}
// amax / 448, rounded correctly, or 1 for a row of zeros; rounded up further to a power of two if
// `power_of_two`.
__device__ __forceinline__ float dynamic_scale(float amax, bool power_of_two) {
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

template <int kLanes>
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffffU, value, step));
  return value;
}

__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | (high << 16);
}
}  // namespace conclave::inline v0::experts::decode

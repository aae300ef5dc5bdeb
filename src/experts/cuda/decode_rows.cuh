// Rows on their way into a product of the decode kernel: read in any type, rounded or quantised.
#pragma once

#include "experts/cuda/decode_sm90.h"

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace conclave::inline v0::experts::decode {

inline constexpr float kE4M3Max = 448.0F;

__device__ __forceinline__ float read_element(const void* row, DType dtype, int64_t column) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(row)[column];
    case DType::kF16:
      return __half2float(static_cast<const __half*>(row)[column]);
    default:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(row)[column]);
  }
}

// Columns [column, column + 8) of a row, zeros from `width` on.
__device__ __forceinline__ void read_eight(const void* row, DType dtype, int32_t column,
                                           int32_t width, float (&values)[8]) {
  const size_t bytes = dtype == DType::kF32 ? 4 : 2;
  const char* source = static_cast<const char*>(row) + static_cast<size_t>(column) * bytes;
  if (column + 8 > width || reinterpret_cast<uintptr_t>(source) % 16 != 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      values[i] = column + i < width ? read_element(row, dtype, column + i) : 0.0F;
    return;
  }
  const uint4 first = *reinterpret_cast<const uint4*>(source);
  const uint32_t words[4] = {first.x, first.y, first.z, first.w};
  if (dtype == DType::kF32) {
    const uint4 second = *reinterpret_cast<const uint4*>(source + 16);
    const uint32_t more[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = __uint_as_float(words[i]);
      values[i + 4] = __uint_as_float(more[i]);
    }
  } else if (dtype == DType::kF16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      __half2 pair;
      memcpy(&pair, &words[i], 4);
      const float2 both = __half22float2(pair);
      values[2 * i] = both.x;
      values[2 * i + 1] = both.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000U);
    }
  }
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}

// A step between e4m3 codes, and what dividing by it needs.
struct Step {
  float value;
  float inverse;
  bool inexact;  // the inverse is not normal: divide
};
__device__ __forceinline__ Step make_step(float value) {
  return {value, 1.0F / value, !(value > 0x1p-100F && value < 0x1p100F)};
}
// amax / 448; 1 for a row of zeros.
__device__ __forceinline__ float dynamic_scale(float amax, bool power_of_two) {
  float scale = __fdiv_rn(amax, kE4M3Max);
  if (power_of_two && scale > 0 && scale < INFINITY) {
    const uint32_t bits = __float_as_uint(scale);
    const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffU) != 0 ? 1U : 0U);
    scale = __uint_as_float((exponent > 0 ? exponent : 1U) << 23);
  }
  return scale == 0 ? 1.0F : scale;
}

// Correctly rounded for all but a few quotients: one Newton step from x * (1 / step).
__device__ __forceinline__ float divide(float x, const Step& step) {
  if (step.inexact) return __fdiv_rn(x, step.value);
  const float quotient = x * step.inverse;
  return fmaf(fmaf(-quotient, step.value, x), step.inverse, quotient);
}

__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | (high << 16);
}
// Infinity saturates in the conversion: as a constant step leaves it, it must become NaN.
__device__ __forceinline__ float code_value(float x, const Step& step) {
  return isinf(x) ? NAN : divide(x, step);
}

}  // namespace conclave::inline v0::experts::decode

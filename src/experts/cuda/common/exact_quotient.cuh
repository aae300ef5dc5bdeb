// Quotients of many values by one scale, rounded as IEEE 754 says, without a division for each.
#pragma once

#include "experts/cuda/common/e4m3.cuh"

#include <cstdint>

namespace conclave::inline v0::experts {

// True for scales whose quotients neither overflow nor lose bits: 2^-90 to 2^90.
__device__ __forceinline__ bool is_plain(float scale) {
  constexpr float kLeast = 8.0779357e-28F;
  constexpr float kGreatest = 1.2379400e27F;
  return scale >= kLeast && scale <= kGreatest;
}

// Divides a float32 x by a scale as IEEE 754 says: the remainder of a first quotient brings the
// second to the nearest number, if the inverse is rounded correctly (Markstein 1990). One Newton
// step rounds it so but where the scale's mantissa is all ones.
struct Inverse {
  float scale;
  float inverse;
};
__device__ __forceinline__ bool has_inverse(float scale) {
  constexpr uint32_t kMantissa = 0x7FFFFFU;
  return is_plain(scale) && (__float_as_uint(scale) & kMantissa) != kMantissa;
}
__device__ __forceinline__ Inverse inverse_of(float scale) { return {scale, fast_inverse(scale)}; }
__device__ __forceinline__ float times(float x, const Inverse& inverse) {
  const float quotient = __fmul_rn(x, inverse.inverse);
  // What the quotient has too much, so that zeros keep their signs.
  const float excess = __fmaf_rn(quotient, inverse.scale, -x);
  return __fmaf_rn(-excess, inverse.inverse, quotient);
}

}  // namespace conclave::inline v0::experts

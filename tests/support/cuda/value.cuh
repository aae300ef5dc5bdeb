// Element conversions and random numbers for the device side of tests.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace conclave::testing::device {

__device__ inline double widen(float value) { return value; }
__device__ inline double widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline double widen(__half value) { return __half2float(value); }
__device__ inline double widen(__nv_fp8_e4m3 value) { return static_cast<float>(value); }

template <class Element>
__device__ inline Element narrow(double value) {
  return static_cast<Element>(static_cast<float>(value));
}
// Converts from float64 directly, saturating, to nearest even.
template <>
__device__ inline __nv_fp8_e4m3 narrow<__nv_fp8_e4m3>(double value) {
  __nv_fp8_e4m3 code;
  code.__x = __nv_cvt_double_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
  return code;
}

// The quantisation step for values whose largest magnitude is `amax`: docs/quantisation.md.
__device__ inline float quantization_step(float amax, bool power_of_two) {
  const float step = amax / 448.0F;
  if (!(step > 0.0F)) return 1.0F;
  if (!power_of_two || isinf(step)) return step;
  int exponent = 0;
  const float mantissa = frexpf(step, &exponent);
  return fmaxf(mantissa == 0.5F ? step : ldexpf(1.0F, exponent), 0x1p-126F);
}

// Returns 64 random bits for a counter (the finaliser of splitmix64).
__device__ inline uint64_t random_bits(uint64_t seed, uint64_t counter) {
  uint64_t x = seed * 0x9e3779b97f4a7c15ULL + counter;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// Returns numbers with mean 0 and deviation 1, bell-shaped in [-3.5, 3.5]: the sum of four uniform
// ones.
__device__ inline float random_normal(uint64_t seed, uint64_t counter) {
  const uint64_t bits = random_bits(seed, counter);
  const uint64_t sum =
      (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
  return (static_cast<float>(sum) - 131070.0F) * (1.7320508F / 65535.0F);
}

}  // namespace conclave::testing::device

// Exponential and sigmoid in double without branches, so that the columns of a lane overlap: the
// library's functions branch and run one column after the other. Within 2 units in the last place.
#pragma once

#include "cuda/device/math.cuh"

#include <cstdint>

namespace conclave::inline v0::routing::device {

// 2^exponent, for exponents from -1022 to 1023.
__device__ __forceinline__ double power_of_two(int32_t exponent) {
  return __hiloint2double((exponent + 1023) << 20, 0);
}

// x in [-746, 709]; 0 below. Splits x = n ln 2 + r, |r| < 0.35, and uses Taylor's series to r^13 /
// 13!, whose remainder is below 2^-57.
__device__ __forceinline__ double exp_below_709(double x) {
  constexpr double kLog2E = 1.4426950408889634;
  constexpr double kLn2High = 0.6931471805599453;
  constexpr double kLn2Low = 2.3190468138462996e-17;
  constexpr double kShift = 6755399441055744.0;  // 1.5 x 2^52: adding it leaves n in the low bits
  const double shifted = __fma_rn(x, kLog2E, kShift);
  const int32_t n = __double2loint(shifted);
  const double whole = shifted - kShift;
  const double r = __fma_rn(whole, -kLn2Low, __fma_rn(whole, -kLn2High, x));
  double sum = 1.0 / 6227020800.0;
  sum = __fma_rn(sum, r, 1.0 / 479001600.0);
  sum = __fma_rn(sum, r, 1.0 / 39916800.0);
  sum = __fma_rn(sum, r, 1.0 / 3628800.0);
  sum = __fma_rn(sum, r, 1.0 / 362880.0);
  sum = __fma_rn(sum, r, 1.0 / 40320.0);
  sum = __fma_rn(sum, r, 1.0 / 5040.0);
  sum = __fma_rn(sum, r, 1.0 / 720.0);
  sum = __fma_rn(sum, r, 1.0 / 120.0);
  sum = __fma_rn(sum, r, 1.0 / 24.0);
  sum = __fma_rn(sum, r, 1.0 / 6.0);
  sum = __fma_rn(sum, r, 0.5);
  sum = __fma_rn(sum, r, 1.0);
  sum = __fma_rn(sum, r, 1.0);
  // The power is applied in two steps, since 2^n below 2^-1022 is not a normal double.
  const int32_t half = n / 2;
  return x < -746.0 ? 0.0 : sum * power_of_two(half) * power_of_two(n - half);
}

// 1 / d for d in [1, 2]: the approximate reciprocal and two Newton steps.
__device__ __forceinline__ double reciprocal_of_1_to_2(double d) {
  auto y = static_cast<double>(__fdividef(1.0F, __double2float_rn(d)));
  y = __fma_rn(y, __fma_rn(-d, y, 1.0), y);
  return __fma_rn(y, __fma_rn(-d, y, 1.0), y);
}

// 1 / (1 + exp(-x)), and 0 if exp(-x) overflows double, as the plain formula gives.
__device__ __forceinline__ double sigmoid(double x) {
  const double magnitude = x < 0 ? -x : x;
  const double e = exp_below_709(-(magnitude < 1000.0 ? magnitude : 1000.0));
  const double r = reciprocal_of_1_to_2(1.0 + e);
  const double value = x < 0 ? e * r : r;
  return x < -709.782712893384 ? 0.0 : value;
}

// Exponential for weights, which are rounded to float32: within 2^-31 for x up to 1. Taylor's
// series to r^8 / 8!, with a remainder below 2^-32, is summed in pairs, which shortens the
// dependency chain.
__device__ __forceinline__ double exp_to_weigh(double x) {
  constexpr double kLog2E = 1.4426950408889634;
  constexpr double kLn2 = 0.6931471805599453;
  constexpr double kShift = 6755399441055744.0;  // 1.5 x 2^52: adding it leaves n in the low bits
  const double shifted = __fma_rn(x, kLog2E, kShift);
  const double r = __fma_rn(shifted - kShift, -kLn2, x);
  const double r2 = r * r;
  const double low = __fma_rn(__fma_rn(r, 1.0 / 6.0, 0.5), r2, 1.0 + r);
  const double middle =
      __fma_rn(__fma_rn(r, 1.0 / 5040.0, 1.0 / 720.0), r2, __fma_rn(r, 1.0 / 120.0, 1.0 / 24.0));
  const double r4 = r2 * r2;
  const double sum = __fma_rn(__fma_rn(r4, 1.0 / 40320.0, middle), r4, low);
  // Below -708 the power of two would not be a normal double.
  return x < -708.0 ? 0.0 : sum * power_of_two(__double2loint(shifted));
}

// value / divisor to the precision of a weight, fast if divisor and inverse are ordinary numbers.
__device__ __forceinline__ double divided(double value, double divisor) {
  if (!(fabs(divisor) > 1e-280 && fabs(divisor) < 1e280)) return value / divisor;
  const double y = cuda::device::rcp_near(divisor);
  const double better = __fma_rn(y, __fma_rn(-divisor, y, 1.0), y);
  return value * __fma_rn(better, __fma_rn(-divisor, better, 1.0), better);
}

}  // namespace conclave::inline v0::routing::device

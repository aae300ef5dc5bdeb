// silu(gate) * up of two neighbouring features 2 i and 2 i + 1 of a row with one reciprocal for
// both: the special function unit would otherwise limit epilogues. Every kernel pairs the same
// features, so that all of them give the same bits. NaN and infinities propagate as in
// activation/device/formulas.cuh, but never to the neighbour, because divisors stay finite.
#pragma once

#include "cuda/device/math.cuh"
#include "experts/cuda/common/vocabulary.h"

namespace conclave::inline v0::experts {

// 1 + e^-gate, at most 2^60, so that the product of two stays finite. For gates below -41 the
// sigmoid is thus 1e-18 instead of less.
__device__ __forceinline__ float silu_divisor(float gate) {
  constexpr float kMinusLog2E = -1.44269504F;
  return 1.0F + ptx::ex2(fminf(gate * kMinusLog2E, 60.0F));
}

// The result for a feature with divisor `own`; `other` is its neighbour's and `inverse` is 1 / (own
// * other). The floor of -110 prevents -inf * 0.
__device__ __forceinline__ float silu_of_pair(float gate, float up, float other, float inverse) {
  return ptx::max_or_nan(gate, -110.0F) * up * (other * inverse);
}

// The result for a feature whose neighbour is in another thread.
__device__ __forceinline__ float silu_beside(float gate, float up, float own, float other) {
  return silu_of_pair(gate, up, other, ptx::rcp(own * other));
}

// The results for two features in one thread; they replace the gates.
__device__ __forceinline__ void silu_pair(float& gate0, float& gate1, float up0, float up1) {
  const float divisor0 = silu_divisor(gate0);
  const float divisor1 = silu_divisor(gate1);
  const float inverse = ptx::rcp(divisor0 * divisor1);
  gate0 = silu_of_pair(gate0, up0, divisor1, inverse);
  gate1 = silu_of_pair(gate1, up1, divisor0, inverse);
}

}  // namespace conclave::inline v0::experts

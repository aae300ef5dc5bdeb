// Scales and offsets that are steps: a byte each, and units that many columns share.
#pragma once

#include <cstdint>

namespace conclave::inline v0::experts {

// The number of which the `second` or the first step of a pair is one, in units of it.
__device__ __forceinline__ float of_step(uint32_t pair, uint32_t second, float unit) {
  // 2^23 and a byte behind it.
  const uint32_t bits = __byte_perm(pair, 0x4b000000U, 0x7650 + second);
  return (__uint_as_float(bits) - (0x1p23F + 128)) * unit;
}

// The scale and the offset of a row and 32 columns: `pair` has the steps of both, each more by 128,
// and `units` their units. Products have the bits of the numbers that became steps.
__device__ __forceinline__ float2 of_steps(uint32_t pair, float2 units) {
  return {of_step(pair, 0, units.x), of_step(pair, 1, units.y)};
}

}  // namespace conclave::inline v0::experts

// Scales of codes that stand for whole numbers in their order, beside which kernels for tensor
// cores make a weight in one instruction.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace conclave::inline v0::experts {

// Whether bf16 holds the scale and what it makes of `least`, the number of code 0, with room for
// the factor that kernels give to weights.
inline bool is_short_scale(float scale, int32_t least) {
  constexpr float kLeast = 0x1p-40F;
  constexpr float kMost = 0x1p40F;
  const auto has_short_bits = [](float number) {
    return (std::bit_cast<uint32_t>(number) & 0xffffU) == 0;
  };
  const float magnitude = scale < 0 ? -scale : scale;
  const bool is_within = scale == 0 || (magnitude >= kLeast && magnitude <= kMost);
  return is_within && has_short_bits(scale) && has_short_bits(scale * static_cast<float>(least));
}

// Whether bf16 holds the products of all codes of 4 bits and so many steps.
inline bool is_short_step(int step, int32_t least) {
  constexpr int kMost = 256;  // no whole number below has more than eight bits
  constexpr int32_t kCodes = 16;
  const auto magnitude = [](int number) { return number < 0 ? -number : number; };
  const int largest = std::max(magnitude(least), magnitude(least + kCodes - 1));
  return magnitude(step) * largest <= kMost;
}

}  // namespace conclave::inline v0::experts

// The values that quantised rows may have, in the place of their codes: for loops without branches,
// on every device.
#pragma once

#include "quant/weight_format.h"

#include <bit>
#include <cmath>
#include <cstdint>

namespace conclave::inline v0::quant {

// The values of codes of rows: multiples of a unit, which doubles with each power of two from
// `least_normal` on; whole numbers have one unit.
struct RowGrid {
  float least_normal;
  float largest;
  float lowest;    // the magnitude of the outermost value below zero
  uint32_t shift;  // turns an exponent into that of a number whose last place is the unit

  // Codes of rows are floats or bytes of whole numbers.
  static RowGrid of(const CodeBook& codes) {
    constexpr int kBitsOfByte = 7;
    const int bits = codes.mantissa_bits.value_or(kBitsOfByte);
    const float least_normal =
        codes.mantissa_bits ? std::ldexp(codes.decode(1), bits) : std::ldexp(1.0F, bits);
    return {.least_normal = least_normal,
            .largest = codes.largest,
            .lowest = codes.mantissa_bits ? codes.largest : least_normal,
            .shift = static_cast<uint32_t>(23 - bits) << 23};
  }

  // The nearest value to a magnitude, ties to even, as a code would have it, at most `most`: adding
  // a number with the unit in its last place rounds to it.
  constexpr float nearest(float magnitude, float most) const {
    const float value = magnitude < most ? magnitude : most;
    const float normal = value > least_normal ? value : least_normal;
    constexpr uint32_t kExponent = 0x7f800000U;
    const float shifter =
        std::bit_cast<float>((std::bit_cast<uint32_t>(normal) & kExponent) + shift);
    return (value + shifter) - shifter;
  }
  // The same for a finite quotient, with its sign.
  constexpr float nearest(float quotient) const {
    const uint32_t bits = std::bit_cast<uint32_t>(quotient);
    const uint32_t sign = bits & 0x80000000U;
    const float found = nearest(std::bit_cast<float>(bits ^ sign), sign != 0 ? lowest : largest);
    return std::bit_cast<float>(std::bit_cast<uint32_t>(found) | sign);
  }
};

}  // namespace conclave::inline v0::quant

// Scalar conversions of the 16-bit float types. They round to nearest even; NaN stays a quiet NaN.
#pragma once

#include <bit>
#include <cstdint>

namespace conclave::inline v0 {

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<uint16_t>((bits >> 16) | 0x0040U);
  const uint32_t rounding = 0x7fffU + ((bits >> 16) & 1U);
  return static_cast<uint16_t>((bits + rounding) >> 16);
}

inline float f16_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000U} << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fU;
  const uint32_t mantissa = bits & 0x3ffU;
  if (exponent == 0x1fU) {
    const uint32_t quiet = mantissa != 0 ? 0x00400000U : 0U;
    return std::bit_cast<float>(sign | 0x7f800000U | quiet | (mantissa << 13));
  }
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (mantissa << 13));
  // A subnormal is mantissa x 2^-24, which is exact in float32.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}

inline uint16_t float_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) {
    return static_cast<uint16_t>(sign | 0x7e00U | ((magnitude >> 13) & 0x1ffU));
  }
  // 65520 is halfway between the largest finite f16 and 2^16; it and all above round to infinity.
  if (magnitude >= 0x477ff000U) return static_cast<uint16_t>(sign | 0x7c00U);
  if (magnitude < 0x38800000U) {
    // Below 2^-14: adding 0.5 puts the unit of the last place at 2^-24, so the FPU rounds for us.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000U));
  }
  const uint32_t rounding = 0xfffU + ((magnitude >> 13) & 1U);
  return static_cast<uint16_t>(sign | ((magnitude + rounding - 0x38000000U) >> 13));
}

// Rounds double to float32 to odd: the last bit is set if the value is not exact, so that a later
// rounding to a shorter type goes the way that one rounding from double would.
inline float double_to_float_odd(double value) {
  const auto nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  const bool not_finite = (bits & 0x7f800000U) == 0x7f800000U;
  if (not_finite && back != value && value == value) {
    // A finite double beyond float32 becomes the largest float: it is odd and overflows every
    // shorter type.
    return std::bit_cast<float>((bits & 0x80000000U) | 0x7f7fffffU);
  }
  if (not_finite || back == value) return nearest;
  const bool rounded_away = (back > value) == (value > 0);
  if (rounded_away) --bits;
  return std::bit_cast<float>(bits | 1U);
}

inline uint16_t double_to_bf16(double value) { return float_to_bf16(double_to_float_odd(value)); }
inline uint16_t double_to_f16(double value) { return float_to_f16(double_to_float_odd(value)); }

}  // namespace conclave::inline v0

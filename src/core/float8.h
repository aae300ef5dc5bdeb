// Scalar conversions of the 8-bit float types that weights and activations are stored in: e4m3
// (sign, 4 exponent bits of bias 7, 3 mantissa bits; no infinity, NaN 0x7f and 0xff, largest 448),
// e5m2 (5 exponent bits of bias 15, 2 mantissa bits, infinity 0x7c, largest 57344) and the
// exponent-only e8m0. OCP 8-bit Floating Point Specification 1.0, OCP Microscaling Formats 1.0.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace conclave::inline v0 {

inline constexpr float kLargestE4m3 = 448.0F;
inline constexpr float kLargestE5m2 = 57344.0F;

constexpr float e4m3_to_float(uint8_t code) {
  const uint32_t sign = uint32_t{code & 0x80U} << 24;
  const uint32_t magnitude = code & 0x7fU;
  if (magnitude == 0x7fU) return std::bit_cast<float>(sign | 0x7fc00000U);
  // The bits are in place but the exponent is 120 too small: exact for subnormal codes as well.
  const float scaled = std::bit_cast<float>(magnitude << 20) * 0x1p120F;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | sign);
}

// Rounds to nearest, ties to even; a finite value beyond 448 becomes 448, infinity and NaN become
// NaN.
constexpr uint8_t float_to_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80U);
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude >= 0x7f800000U) return static_cast<uint8_t>(sign | 0x7fU);
  if (magnitude >= 0x43e00000U) return static_cast<uint8_t>(sign | 0x7eU);  // 448 and above
  if (magnitude < 0x3c800000U) {
    // Below 2^-6: adding 2^14 puts the unit of the last place at 2^-9, so the FPU rounds for us.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14F;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x46800000U));
  }
  const uint32_t rounding = 0x7ffffU + ((magnitude >> 20) & 1U);
  return static_cast<uint8_t>(sign | ((magnitude + rounding - 0x3c000000U) >> 20));
}

constexpr float e5m2_to_float(uint8_t code) {
  const uint32_t sign = uint32_t{code & 0x80U} << 24;
  const uint32_t magnitude = code & 0x7fU;
  if (magnitude >= 0x7cU) {
    return std::bit_cast<float>(sign | (magnitude == 0x7cU ? 0x7f800000U : 0x7fc00000U));
  }
  // As for e4m3, with an exponent that is 112 too small.
  const float scaled = std::bit_cast<float>(magnitude << 21) * 0x1p112F;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | sign);
}

// Rounds to nearest, ties to even; a finite value beyond 57344 becomes 57344, infinity and NaN stay
// that.
constexpr uint8_t float_to_e5m2(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80U);
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude >= 0x7f800000U) {
    return static_cast<uint8_t>(sign | (magnitude == 0x7f800000U ? 0x7cU : 0x7eU));
  }
  if (magnitude >= 0x47600000U) return static_cast<uint8_t>(sign | 0x7bU);  // 57344 and above
  if (magnitude < 0x38800000U) {
    // Below 2^-14: adding 2^7 puts the unit of the last place at 2^-16, so the FPU rounds for us.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p7F;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x43000000U));
  }
  const uint32_t rounding = 0xfffffU + ((magnitude >> 21) & 1U);
  return static_cast<uint8_t>(sign | ((magnitude + rounding - 0x38000000U) >> 21));
}

// The value is 2^(code - 127); 255 is NaN.
constexpr float e8m0_to_float(uint8_t code) {
  if (code == 0xffU) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(code == 0 ? 0x00400000U : uint32_t{code} << 23);
}

// The nearest power of two to a value that is not negative; infinity is beyond all of them and
// becomes NaN.
constexpr uint8_t float_to_e8m0(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (bits >= 0x7f800000U) return 0xffU;
  if (bits < 0x00600000U) return 0;  // below the middle of 2^-127 and 2^-126
  if (bits >= 0x7f400000U) return 0xfeU;
  // Half of the mantissa's range and above goes up: the middle of 1 and 2 is 1.5.
  return static_cast<uint8_t>((bits + 0x00400000U) >> 23);
}

}  // namespace conclave::inline v0

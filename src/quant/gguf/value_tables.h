// The few values that codes of 4 bits stand for where they do not count evenly.
#pragma once

#include <array>
#include <cstdint>

namespace conclave::inline v0::quant {

inline constexpr std::array<int8_t, 16> kIq4Values = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                      1,    13,   25,  38,  53,  69,  89,  113};

// Twice the values of e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, then their negatives. There is no -0.
inline constexpr std::array<int8_t, 16> kTwiceE2m1 = {0, 1,  2,  3,  4,  6,  8,  12,
                                                      0, -1, -2, -3, -4, -6, -8, -12};

// Half of the value of e4m3 bits whose sign is not used; 0x7f, its NaN, is 0.
constexpr float half_of_unsigned_e4m3(int code) {
  if (code == 0x7f) return 0;
  const int exponent = code >> 3 & 15;
  const auto mantissa = static_cast<float>(code & 7);
  if (exponent == 0) return mantissa * 0x1p-10F;
  float unit = 0x1p-11F;
  for (int i = 0; i < exponent; ++i) unit *= 2;
  return (8 + mantissa) * unit;
}

}  // namespace conclave::inline v0::quant

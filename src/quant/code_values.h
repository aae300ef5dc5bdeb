// The compiler works these out from the values of a format's codes, for formats and for kernels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::quant {

// Whether bf16 holds every value of a format exactly. Infinity and NaN do not matter.
template <class Format>
consteval bool exact_in_bf16() {
  for (int code = 0; code < 1 << Format::kBits; ++code) {
    const float value = Format::decode(static_cast<uint8_t>(code));
    if (value == value && (__builtin_bit_cast(uint32_t, value) & 0xffffU) != 0) return false;
  }
  return true;
}

// The values of a format of 4 bits, by code.
struct ValuesByCode {
  float of[16];
};
template <class Format>
consteval ValuesByCode list_values() {
  static_assert(Format::kBits == 4);
  ValuesByCode values{};
  for (int code = 0; code < 16; ++code) {
    values.of[code] = Format::decode(static_cast<uint8_t>(code));
  }
  return values;
}
template <class Format>
inline constexpr ValuesByCode kValuesByCode = list_values<Format>();

// The rank of the nearest of ascending values, ties to the even rank; 0 for NaN.
template <size_t kCount>
constexpr uint8_t nearest_rank(const float (&ascending)[kCount], float value) {
  uint8_t rank = 0;
  for (size_t i = 0; i + 1 < kCount; ++i) {
    // In float64 both sums are exact, so that a tie is one.
    const double between =
        static_cast<double>(ascending[i]) + static_cast<double>(ascending[i + 1]);
    const double twice = 2.0 * static_cast<double>(value);
    if (twice > between || (twice == between && i % 2 != 0)) ++rank;
  }
  return rank;
}

}  // namespace conclave::inline v0::quant

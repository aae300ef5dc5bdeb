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

// The least odd number, of those below 64, by which multiplied bf16 holds every value of a format;
// 0 if there is none. 3 does for halves, quarters and thirds. Infinity and NaN do not matter.
template <class Format>
consteval int bf16_multiplier() {
  if (exact_in_bf16<Format>()) return 1;
  for (int factor = 3; factor < 64; factor += 2) {
    bool holds_all = true;
    for (int code = 0; code < 1 << Format::kBits; ++code) {
      const float value = Format::decode(static_cast<uint8_t>(code));
      constexpr uint32_t kExponent = 0x7f800000U;
      if ((__builtin_bit_cast(uint32_t, value) & kExponent) == kExponent) continue;
      const float product = value * static_cast<float>(factor);
      holds_all &= (__builtin_bit_cast(uint32_t, product) & 0xffffU) == 0;
    }
    if (holds_all) return factor;
  }
  return 0;
}

// The values of a format as whole numbers of a unit, if bytes hold these.
struct WholeCodes {
  bool fit = false;
  float unit = 1;  // a power of two: a value is a whole number times it
  int32_t least = 0;
  int32_t most = 0;
  bool in_order = false;  // code c stands for c + least

  constexpr int32_t magnitude() const { return -least > most ? -least : most; }
};
template <class Format>
consteval WholeCodes whole_codes() {
  constexpr float kSmallestUnit = 0x1p-6F;  // below it no two codes of a byte's range differ
  for (WholeCodes whole; whole.unit >= kSmallestUnit; whole.unit /= 2) {
    whole.least = whole.most = 0;
    whole.fit = true;
    for (int code = 0; code < 1 << Format::kBits && whole.fit; ++code) {
      const float value = Format::decode(static_cast<uint8_t>(code)) / whole.unit;
      whole.fit = value >= -128.0F && value <= 127.0F;
      if (!whole.fit) break;
      const auto number = static_cast<int32_t>(value);
      whole.fit = static_cast<float>(number) == value;
      whole.least = number < whole.least ? number : whole.least;
      whole.most = number > whole.most ? number : whole.most;
    }
    if (!whole.fit) continue;
    whole.in_order = true;
    for (int code = 0; code < 1 << Format::kBits; ++code) {
      const float value = Format::decode(static_cast<uint8_t>(code));
      whole.in_order = whole.in_order && value == static_cast<float>(code + whole.least);
    }
    return whole;
  }
  return {};
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

// Values as bf16, split into bytes: the nearest of each, and the nearest of what that leaves, which
// is 0 where bf16 holds the value. Both together have 16 bits of a mantissa.
struct Bf16Bytes {
  uint8_t low[256];
  uint8_t high[256];
};
constexpr uint16_t nearest_bf16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40U);
  return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}
constexpr float widen_bf16(uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
}
// The bytes of term `term` of every code, those of 4 bits repeated.
template <class Format>
consteval Bf16Bytes list_bf16(int term) {
  Bf16Bytes bytes{};
  for (int i = 0; i < 256; ++i) {
    const float value = Format::decode(static_cast<uint8_t>(i % (1 << Format::kBits)));
    uint16_t bits = nearest_bf16(value);
    // Infinity and NaN leave nothing.
    const bool finite = (__builtin_bit_cast(uint32_t, value) & 0x7f800000U) != 0x7f800000U;
    if (term == 1) bits = finite ? nearest_bf16(value - widen_bf16(bits)) : uint16_t{0};
    bytes.low[i] = static_cast<uint8_t>(bits & 0xffU);
    bytes.high[i] = static_cast<uint8_t>(bits >> 8);
  }
  return bytes;
}
template <class Format, int kTerm>
inline constexpr Bf16Bytes kBf16ByCode = list_bf16<Format>(kTerm);
// The terms that a format needs.
template <class Format>
inline constexpr int kBf16Terms = exact_in_bf16<Format>() ? 1 : 2;
// Whether codes with the upper bit stand for those without, negated: -0 and NaN, too.
template <class Format>
consteval bool has_sign_bit() {
  const Bf16Bytes bytes = list_bf16<Format>(0);
  for (int i = 0; i < 128; ++i) {
    if (bytes.low[i] != bytes.low[i + 128]) return false;
    if ((bytes.high[i] | 0x80) != bytes.high[i + 128] || bytes.high[i] >= 0x80) return false;
  }
  return Format::kBits == 8;
}

// The largest float32 below a finite one.
constexpr float next_below(float value) {
  if (value == 0) return -0x1p-149F;
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  return __builtin_bit_cast(float, value > 0 ? bits - 1 : bits + 1);
}

// A value has one rank more for each of these that it lies above.
template <size_t kCount>
struct RankBounds {
  float of[kCount];
};
template <size_t kCount>
consteval RankBounds<kCount - 1> rank_bounds(const float (&ascending)[kCount]) {
  RankBounds<kCount - 1> bounds{};
  for (size_t i = 0; i + 1 < kCount; ++i) {
    // In float64 the sum is exact, so that a tie is one. Ties go up from odd ranks.
    const double middle =
        (static_cast<double>(ascending[i]) + static_cast<double>(ascending[i + 1])) / 2;
    float bound = static_cast<float>(middle);
    const bool is_above = i % 2 != 0 ? bound >= middle : bound > middle;
    if (is_above) bound = next_below(bound);
    bounds.of[i] = bound;
  }
  return bounds;
}

// The rank of the nearest of ascending values, ties to the even rank. It has no branch, so that
// compilers can take several values at once.
template <size_t kCount>
constexpr int32_t nearest_rank(const RankBounds<kCount>& bounds, float value, int32_t rank_of_nan) {
  int32_t rank = value != value ? rank_of_nan : 0;
  for (size_t i = 0; i < kCount; ++i) rank += value > bounds.of[i] ? 1 : 0;
  return rank;
}

}  // namespace conclave::inline v0::quant

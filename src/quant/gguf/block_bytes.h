// Reads and writes the fields of blocks, which have no alignment, and steps that fit them.
#pragma once

#include "core/float_convert.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace conclave::inline v0::quant {

template <class T>
T load_field(const std::byte* bytes) {
  static_assert(std::endian::native == std::endian::little);
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

inline int field_u8(const std::byte* bytes, int64_t index) {
  return std::to_integer<int>(bytes[index]);
}

inline float field_f16(const std::byte* bytes) { return f16_to_float(load_field<uint16_t>(bytes)); }

// The 2 or 4 bits of byte `index` from bit `shift` on.
inline int bits_of(const std::byte* bytes, int64_t index, int shift, int mask) {
  return field_u8(bytes, index) >> shift & mask;
}

inline void store_f16(float value, std::byte* out) {
  const uint16_t bits = float_to_f16(value);
  std::memcpy(out, &bits, sizeof(bits));
}

// Scales beyond float16 become its largest number, so that values saturate and stay finite.
inline float within_f16(float value) {
  constexpr float kLargest = 65504.0F;
  return std::clamp(value, -kLargest, kLargest);
}

// A step below 2^-128 has no inverse in float32; all codes are 0 then, as for a step of 0.
inline float inverse_of(float step) {
  const float inverse = 1.0F / step;
  return step != 0 && std::isfinite(inverse) ? inverse : 0.0F;
}

}  // namespace conclave::inline v0::quant

// Reads the fields of blocks, which have no alignment.
#pragma once

#include "core/float_convert.h"

#include <bit>
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

}  // namespace conclave::inline v0::quant

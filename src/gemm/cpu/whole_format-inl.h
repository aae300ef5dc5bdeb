// Codes whose values are whole numbers, as kernels of any vector width need to know them.
#pragma once

#include "quant/code_values.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Values in units of the format, plus an offset that makes them unsigned bytes.
template <class Format>
struct WholeFormat {
  static constexpr quant::WholeCodes kWhole = quant::whole_codes<Format>();
  static_assert(kWhole.fit);
  static constexpr int32_t kOffset = -kWhole.least;
  static constexpr int32_t kMost = kWhole.most + kOffset;
  static constexpr int64_t kRowBytes = Format::kBits * 8;  // 64 columns

  static constexpr int number(int code) {
    return static_cast<int>(Format::decode(static_cast<uint8_t>(code)) / kWhole.unit) + kOffset;
  }
  // Whether a code is its number.
  static consteval bool codes_ascend() {
    for (int code = 0; code < 1 << Format::kBits; ++code) {
      if (number(code) != code) return false;
    }
    return true;
  }
  // Whether a code of 8 bits becomes its number when its upper bit is flipped.
  static consteval bool bytes_are_twos_complement() {
    for (int code = 0; code < 256; ++code) {
      if (Format::kBits == 8 && number(code) != (code ^ 0x80)) return false;
    }
    return true;
  }
};

// The numbers of codes of 4 bits.
struct Numbers {
  alignas(16) uint8_t of[16];
};
template <class Format>
consteval Numbers list_numbers() {
  Numbers numbers{};
  for (int code = 0; code < 16; ++code) {
    numbers.of[code] = static_cast<uint8_t>(WholeFormat<Format>::number(code));
  }
  return numbers;
}
template <class Format>
inline constexpr Numbers kNumbers = list_numbers<Format>();

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE

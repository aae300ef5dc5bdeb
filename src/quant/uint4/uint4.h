// uint4: half a byte from 0 to 15 that stands for itself, as in GGUF's Q4_K and Q4_1. Zeros bring
// weights below 0. Rows may be int8.
#pragma once

#include "quant/int8/int8.h"
#include "quant/weight_format.h"

#include "conclave/dtype.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace conclave::inline v0::quant {

struct Uint4 {
  static constexpr std::string_view kName = "uint4";
  static constexpr DType kElement = DType::kU4;
  static constexpr int64_t kBits = 4;
  static constexpr float kLargest = 15.0F;
  static constexpr bool kHasNan = false;
  static constexpr std::string_view kCompressedTensors = {};
  // None: scales of magnitudes alone would lose the values below 0.
  static constexpr std::array<WeightForm, 0> kForms = {};
  using Rows = Int8;

  static constexpr float decode(uint8_t code) { return static_cast<float>(code); }
  // NaN becomes 0.
  static constexpr uint8_t encode(float value) {
    if (!(value > 0.0F)) return 0;
    if (value >= kLargest) return 15;
    // As in Int8: adding rounds to nearest even.
    constexpr float kUnit = 0x1.8p23F;
    const float rounded = value + kUnit;
    return static_cast<uint8_t>(static_cast<int32_t>(rounded - kUnit));
  }
  // Where all weights have one sign the roundings of rows add up.
  static Support takes(const QuantSpec& quant) {
    return quant.zeros != WeightZero::kNone ? Support::yes()
                                            : Support::no("needs zeros: no code is below 0");
  }

  // The lower halves of a panel row's bytes are its first 32 columns.
  template <class Vec, bool kUpper>
  [[gnu::always_inline]] static Vec lanes(const std::byte* row, int column) {
    return Vec::template load_u4<kUpper>(row + column);
  }
};

}  // namespace conclave::inline v0::quant

// int6: 6 bits from 0 to 63 that stand for -32 to 31. No tensor has them: a CPU packs matrices of
// int8 so that are known to have no other values, as those of GGUF's Q6_K. Rows may be int8.
#pragma once

#include "quant/int8/int8.h"
#include "quant/weight_format.h"

#include "conclave/dtype.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace conclave::inline v0::quant {

struct Int6 {
  static constexpr std::string_view kName = "int6";
  static constexpr DType kElement = DType::kI6;
  static constexpr int64_t kBits = 6;
  static constexpr float kLargest = 31.0F;
  static constexpr bool kHasNan = false;
  static constexpr std::string_view kCompressedTensors = {};
  static constexpr std::array<WeightForm, 0> kForms = {};
  using Rows = Int8;

  static constexpr float decode(uint8_t code) {
    return static_cast<float>(static_cast<int32_t>(code) - 32);
  }
  // NaN becomes 0.
  static constexpr uint8_t encode(float value) {
    if (!(value > -32.0F)) return value <= -32.0F ? 0 : 32;
    if (value >= kLargest) return 63;
    // Adding rounds to nearest even, as in Int8.
    constexpr float kUnit = 0x1.8p23F;
    const float rounded = value + kUnit;
    return static_cast<uint8_t>(static_cast<int32_t>(rounded - kUnit) + 32);
  }
  static Support takes(const QuantSpec& quant) { return Int8::takes(quant); }

  template <class Vec, bool kUpper>
  [[gnu::always_inline]] static Vec lanes(const std::byte* row, int column) {
    return Vec::template load_i6<kUpper>(row, column);
  }
};

}  // namespace conclave::inline v0::quant

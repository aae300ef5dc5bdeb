// int8: signed bytes from -128 to 127, whose rows may be int8 by token, s = max|x| / 127.
#pragma once

#include "quant/weight_format.h"

#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace conclave::inline v0::quant {

struct Int8 {
  static constexpr std::string_view kName = "int8";
  static constexpr DType kElement = DType::kI8;
  static constexpr int64_t kBits = 8;
  static constexpr float kLargest = 127.0F;
  static constexpr bool kHasNan = false;
  static constexpr std::string_view kCompressedTensors = "int";
  static constexpr WeightForm kForms[] = {
      {.name = "int8-channel",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kChannel},
       .method = "compressed-tensors",
       .format = "int-quantized",
       .type = "int"},
      {.name = "int8-token",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken},
       .method = "compressed-tensors",
       .format = "int-quantized",
       .type = "int"}};
  using Rows = Int8;

  static constexpr float decode(uint8_t code) {
    return static_cast<float>(static_cast<int8_t>(code));
  }
  // NaN becomes 0: the scale of its row says that it was there.
  static constexpr uint8_t encode(float value) {
    if (!(value > -128.0F)) return value <= -128.0F ? 0x80 : 0;
    if (value >= kLargest) return 0x7f;
    // The sum leaves no bits below the unit, so that adding rounds to nearest even.
    constexpr float kUnit = 0x1.8p23F;
    const float rounded = value + kUnit;
    return static_cast<uint8_t>(static_cast<int32_t>(rounded - kUnit));
  }
  static Support takes(const QuantSpec&) { return Support::yes(); }

  template <class Vec, bool kUpper>
  [[gnu::always_inline]] static Vec lanes(const std::byte* row, int column) {
    return Vec::load_signed_bytes(row + (kUpper ? 32 : 0) + column);
  }
};

}  // namespace conclave::inline v0::quant

// int4: half a byte from 0 to 15, which stands for the code less 8. Rows may be int8 by token.
#pragma once

#include "quant/int8/int8.h"
#include "quant/weight_format.h"

#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace conclave::inline v0::quant {

struct Int4 {
  static constexpr std::string_view kName = "int4";
  static constexpr DType kElement = DType::kI4;
  static constexpr int64_t kBits = 4;
  static constexpr float kLargest = 7.0F;
  static constexpr bool kHasNan = false;
  static constexpr std::string_view kCompressedTensors = "int";
  static constexpr WeightForm kForms[] = {
      {.name = "int4-group32",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32},
       .method = "compressed-tensors",
       .format = "pack-quantized",
       .type = "int",
       .packed_in = DType::kI32},
      {.name = "int4-group64",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 64},
       .method = "compressed-tensors",
       .format = "pack-quantized",
       .type = "int",
       .packed_in = DType::kI32},
      {.name = "int4-group128",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kBlock, .block_rows = 1},
       .method = "compressed-tensors",
       .format = "pack-quantized",
       .type = "int",
       .packed_in = DType::kI32}};
  using Rows = Int8;

  static constexpr float decode(uint8_t code) { return static_cast<float>(code) - 8.0F; }
  // NaN becomes 0.
  static constexpr uint8_t encode(float value) {
    if (!(value > -8.0F)) return value <= -8.0F ? 0 : 8;
    if (value >= kLargest) return 15;
    // As in Int8: adding rounds to nearest even.
    constexpr float kUnit = 0x1.8p23F;
    const float rounded = value + kUnit;
    return static_cast<uint8_t>(static_cast<int32_t>(rounded - kUnit) + 8);
  }
  static Support takes(const QuantSpec&) { return Support::yes(); }

  // The lower halves of a panel row's bytes are its first 32 columns.
  template <class Vec, bool kUpper>
  [[gnu::always_inline]] static Vec lanes(const std::byte* row, int column) {
    return Vec::sub(Vec::template load_u4<kUpper>(row + column), Vec::broadcast(8.0F));
  }
};

}  // namespace conclave::inline v0::quant

// uint2: 2 bits from 0 to 3 that stand for themselves. No tensor and no panel has them: a GPU holds
// matrices of codes of 4 bits so that are known to have no other values, as those of GGUF's Q2_K.
#pragma once

#include "quant/int8/int8.h"
#include "quant/uint4/uint4.h"
#include "quant/weight_format.h"

#include "conclave/dtype.h"

#include <array>
#include <cstdint>
#include <string_view>

namespace conclave::inline v0::quant {

struct Uint2 {
  static constexpr std::string_view kName = "uint2";
  static constexpr DType kElement = DType::kU2;
  static constexpr int64_t kBits = 2;
  static constexpr float kLargest = 3.0F;
  static constexpr bool kHasNan = false;
  static constexpr std::string_view kCompressedTensors = {};
  static constexpr std::array<WeightForm, 0> kForms = {};
  using Rows = Int8;

  static constexpr float decode(uint8_t code) { return static_cast<float>(code); }
  // NaN becomes 0.
  static constexpr uint8_t encode(float value) {
    return value >= kLargest ? 3 : Uint4::encode(value);
  }
  static Support takes(const QuantSpec& quant) { return Uint4::takes(quant); }
};

}  // namespace conclave::inline v0::quant

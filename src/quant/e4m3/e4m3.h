// e4m3: 8-bit floats (core/float8.h has the conversion), largest 448, whose rows may be e4m3 too.
#pragma once

#include "core/float8.h"
#include "quant/weight_format.h"

#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace conclave::inline v0::quant {

struct E4m3 {
  static constexpr std::string_view kName = "e4m3";
  static constexpr DType kElement = DType::kF8E4M3;
  static constexpr int64_t kBits = 8;
  static constexpr int kMantissaBits = 3;
  static constexpr float kLargest = kLargestE4m3;
  static constexpr bool kHasNan = true;
  static constexpr std::string_view kCompressedTensors = "float";
  static constexpr WeightForm kForms[] = {
      {.name = "fp8-block",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup},
       .method = "fp8"},
      {.name = "fp8-channel",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken},
       .method = "compressed-tensors",
       .format = "float-quantized",
       .type = "float"},
      {.name = "fp8-tensor",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kTensor, .activations = ActivationScale::kToken},
       .method = "fp8"},
      {.name = "fp8-static",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kTensor, .activations = ActivationScale::kTensorStatic},
       .method = "fp8"},
      {.name = "mxfp8",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kBlock,
                 .block_rows = 1,
                 .block_cols = 32,
                 .activations = ActivationScale::kGroup,
                 .activation_group = 32,
                 .activation_scale_rule = RowScaleRule::kHalfPower},
       .method = "compressed-tensors",
       .format = "mxfp8-quantized",
       .type = "float",
       .scale_dtype = DType::kF8E8M0}};
  using Rows = E4m3;

  static constexpr float decode(uint8_t code) { return e4m3_to_float(code); }
  static constexpr uint8_t encode(float value) { return float_to_e4m3(value); }
  static Support takes(const QuantSpec&) { return Support::yes(); }

  // A vector of the 32 columns of a half of a panel's row.
  template <class Vec, bool kUpper>
  [[gnu::always_inline]] static Vec lanes(const std::byte* row, int column) {
    return Vec::load_e4m3(row + (kUpper ? 32 : 0) + column);
  }
};

}  // namespace conclave::inline v0::quant

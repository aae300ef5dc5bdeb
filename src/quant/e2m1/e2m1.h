// e2m1: 4-bit floats with 2 exponent bits and 1 mantissa bit, the values 0, 0.5, 1, 1.5, 2, 3, 4
// and 6 with a sign; no NaN. OCP Microscaling Formats 1.0. Rows may be e4m3.
#pragma once

#include "quant/code_values.h"
#include "quant/e4m3/e4m3.h"
#include "quant/weight_format.h"

#include "conclave/dtype.h"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace conclave::inline v0::quant {

struct E2m1 {
  static constexpr std::string_view kName = "e2m1";
  static constexpr DType kElement = DType::kF4;
  static constexpr int64_t kBits = 4;
  static constexpr int kMantissaBits = 1;
  static constexpr float kLargest = 6.0F;
  static constexpr bool kHasNan = false;
  static constexpr std::string_view kCompressedTensors = "float";
  static constexpr WeightForm kForms[] = {
      {.name = "mxfp4",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kBlock,
                 .block_rows = 1,
                 .block_cols = 32,
                 .scale_values = ScaleValues::kPowerOfTwo},
       .method = "compressed-tensors",
       .format = "mxfp4-pack-quantized",
       .type = "float",
       .packed_in = DType::kU8,
       .scale_dtype = DType::kF8E8M0},
      {.name = "nvfp4",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kBlock,
                 .block_rows = 1,
                 .block_cols = 16,
                 .scale_values = ScaleValues::kFloat8,
                 .has_global_scale = true},
       .method = "compressed-tensors",
       .format = "nvfp4-pack-quantized",
       .type = "float",
       .packed_in = DType::kU8,
       .scale_dtype = DType::kF8E4M3},
      {.name = "mxfp4-fp8",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kBlock,
                 .block_rows = 1,
                 .block_cols = 32,
                 .activations = ActivationScale::kToken,
                 .scale_values = ScaleValues::kPowerOfTwo},
       .method = "compressed-tensors",
       .format = "mxfp4-pack-quantized",
       .type = "float",
       .packed_in = DType::kU8,
       .scale_dtype = DType::kF8E8M0},
      {.name = "mxfp4-fp8-group",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kBlock,
                 .block_rows = 1,
                 .block_cols = 32,
                 .activations = ActivationScale::kGroup,
                 .scale_values = ScaleValues::kPowerOfTwo}},
      {.name = "mxfp4-rows",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kBlock,
                 .block_rows = 1,
                 .block_cols = 32,
                 .activations = ActivationScale::kGroup,
                 .activation_group = 32,
                 .activation_dtype = kElement,
                 .activation_scale_rule = RowScaleRule::kEvenPower,
                 .scale_values = ScaleValues::kPowerOfTwo},
       .method = "compressed-tensors",
       .format = "mxfp4-pack-quantized",
       .type = "float",
       .packed_in = DType::kU8,
       .scale_dtype = DType::kF8E8M0},
      {.name = "nvfp4-rows",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kBlock,
                 .block_rows = 1,
                 .block_cols = 16,
                 .activations = ActivationScale::kGroup,
                 .activation_group = 16,
                 .activation_dtype = kElement,
                 .activation_scale_rule = RowScaleRule::kTwoLevel,
                 .scale_values = ScaleValues::kFloat8,
                 .has_global_scale = true},
       .method = "compressed-tensors",
       .format = "nvfp4-pack-quantized",
       .type = "float",
       .packed_in = DType::kU8,
       .scale_dtype = DType::kF8E4M3}};
  using Rows = E4m3;

  static constexpr float decode(uint8_t code) {
    const uint32_t sign = uint32_t{code & 8U} << 28;
    // As in e4m3: the bits are in place but the exponent is 126 too small.
    const float scaled = std::bit_cast<float>(uint32_t{code & 7U} << 22) * 0x1p126F;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | sign);
  }
  // NaN becomes 0.
  static constexpr uint8_t encode(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const auto sign = static_cast<uint8_t>((bits >> 28) & 8U);
    const uint32_t magnitude = bits & 0x7fffffffU;
    if (magnitude > 0x7f800000U) return 0;
    if (magnitude >= 0x40c00000U) return static_cast<uint8_t>(sign | 7U);  // 6 and above
    if (magnitude < 0x3f800000U) {
      // Below 1: adding 2^22 puts the unit of the last place at 0.5, so the FPU rounds for us.
      const float shifted = std::bit_cast<float>(magnitude) + 0x1p22F;
      return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x4a800000U));
    }
    const uint32_t rounding = 0x1fffffU + ((magnitude >> 22) & 1U);
    return static_cast<uint8_t>(sign | ((magnitude + rounding - 0x3f000000U) >> 22));
  }
  static Support takes(const QuantSpec&) { return Support::yes(); }

  // The lower halves of a panel row's bytes are its first 32 columns.
  template <class Vec, bool kUpper>
  [[gnu::always_inline]] static Vec lanes(const std::byte* row, int column) {
    return Vec::template look_up_u4<kUpper>(kValuesByCode<E2m1>.of, row + column);
  }
};

}  // namespace conclave::inline v0::quant

// bnb_fp4: the 16 values of bitsandbytes' "fp4". Its codes are not those of e2m1, and do not ascend
// with their magnitudes: of codes 0 to 7 these are 0, 1/192, 2/3, 1, 1/3, 1/2, 1/6 and 1/4.
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

// Helpers come first, since nvcc evaluates `lanes` when it has read it.
class BnbFp4 {
  struct Magnitudes {
    float of[8];
  };
  // A function, since device code has no constants of the host.
  static constexpr Magnitudes ascending() {
    return {{0.0F, 0.0625F / 12, 2.0F / 12, 3.0F / 12, 4.0F / 12, 6.0F / 12, 8.0F / 12, 1.0F}};
  }
  // The code of a rank, and the rank of a code: 2 and 3 change places with 6 and 7.
  static constexpr uint8_t rank_of(uint32_t code) {
    return static_cast<uint8_t>((code & 2U) != 0 ? code ^ 4U : code);
  }

 public:
  static constexpr std::string_view kName = "bnb_fp4";
  static constexpr DType kElement = DType::kBnbFP4;
  static constexpr int64_t kBits = 4;
  static constexpr float kLargest = 1.0F;
  static constexpr bool kHasNan = false;
  static constexpr std::string_view kCompressedTensors = {};
  static constexpr WeightForm kForms[] = {
      {.name = "bnb-fp4",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 64}}};
  using Rows = E4m3;

  static constexpr float decode(uint8_t code) {
    const float magnitude = ascending().of[rank_of(code & 7U)];
    const uint32_t sign = uint32_t{code & 8U} << 28;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  // NaN becomes 0.
  static constexpr uint8_t encode(float value) {
    constexpr auto kBounds = rank_bounds(ascending().of);
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const float magnitude = std::bit_cast<float>(bits & 0x7fffffffU);
    const uint32_t sign = value != value ? 0 : (bits >> 28) & 8U;
    const auto rank = static_cast<uint32_t>(nearest_rank(kBounds, magnitude, 0));
    return static_cast<uint8_t>(sign | rank_of(rank));
  }
  static Support takes(const QuantSpec&) { return Support::yes(); }

  // The lower halves of a panel row's bytes are its first 32 columns.
  template <class Vec, bool kUpper>
  [[gnu::always_inline]] static Vec lanes(const std::byte* row, int column) {
    return Vec::template look_up_u4<kUpper>(kValuesByCode<BnbFp4>.of, row + column);
  }
};

}  // namespace conclave::inline v0::quant

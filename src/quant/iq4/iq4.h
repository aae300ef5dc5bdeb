// iq4: the 16 whole numbers of ggml's types IQ4_NL and IQ4_XS, from -127 to 113 and closer to each
// other around 0. Rows may be int8.
#pragma once

#include "quant/code_values.h"
#include "quant/int8/int8.h"
#include "quant/weight_format.h"

#include "conclave/dtype.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace conclave::inline v0::quant {

class Iq4 {
  // As in Nf4, a function, and the first one.
  static constexpr ValuesByCode values() {
    return {{-127.0F, -104.0F, -83.0F, -65.0F, -49.0F, -35.0F, -22.0F, -10.0F, 1.0F, 13.0F, 25.0F,
             38.0F, 53.0F, 69.0F, 89.0F, 113.0F}};
  }

 public:
  static constexpr std::string_view kName = "iq4";
  static constexpr DType kElement = DType::kIQ4;
  static constexpr int64_t kBits = 4;
  static constexpr float kLargest = 113.0F;
  static constexpr bool kHasNan = false;
  static constexpr std::string_view kCompressedTensors = {};
  // None: zeros would not come back.
  static constexpr std::array<WeightForm, 0> kForms = {};
  using Rows = Int8;

  static constexpr float decode(uint8_t code) { return values().of[code]; }
  // Codes ascend with their values. There is no 0; NaN becomes the value next to it.
  static constexpr uint8_t encode(float value) {
    constexpr auto kBounds = rank_bounds(values().of);
    return static_cast<uint8_t>(nearest_rank(kBounds, value, 8));
  }
  static Support takes(const QuantSpec&) { return Support::yes(); }

  // The lower halves of a panel row's bytes are its first 32 columns.
  template <class Vec, bool kUpper>
  [[gnu::always_inline]] static Vec lanes(const std::byte* row, int column) {
    return Vec::template look_up_u4<kUpper>(kValuesByCode<Iq4>.of, row + column);
  }
};

}  // namespace conclave::inline v0::quant

// nf4: the 16 values of bitsandbytes' "nf4", quantiles of a normal distribution from -1 to 1 that
// few bits of a mantissa do not hold. QLoRA (Dettmers et al. 2023), appendix E.
#pragma once

#include "quant/code_values.h"
#include "quant/e4m3/e4m3.h"
#include "quant/weight_format.h"

#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace conclave::inline v0::quant {

class Nf4 {
  // A function, since device code has no constants of the host; the first one, since nvcc evaluates
  // `lanes` when it has read it.
  static constexpr ValuesByCode values() {
    return {{-1.0F, -0.6961928009986877F, -0.5250730514526367F, -0.39491748809814453F,
             -0.28444138169288635F, -0.18477343022823334F, -0.09105003625154495F, 0.0F,
             0.07958029955625534F, 0.16093020141124725F, 0.24611230194568634F, 0.33791524171829224F,
             0.44070982933044434F, 0.5626170039176941F, 0.7229568362236023F, 1.0F}};
  }

 public:
  static constexpr std::string_view kName = "nf4";
  static constexpr DType kElement = DType::kNF4;
  static constexpr int64_t kBits = 4;
  static constexpr float kLargest = 1.0F;
  static constexpr bool kHasNan = false;
  static constexpr std::string_view kCompressedTensors = {};
  static constexpr WeightForm kForms[] = {
      {.name = "nf4",
       .dtype = kElement,
       .quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 64}}};
  using Rows = E4m3;

  static constexpr float decode(uint8_t code) { return values().of[code]; }
  // Codes ascend with their values. NaN becomes 0.
  static constexpr uint8_t encode(float value) {
    constexpr auto kBounds = rank_bounds(values().of);
    return static_cast<uint8_t>(nearest_rank(kBounds, value, 7));
  }
  static Support takes(const QuantSpec&) { return Support::yes(); }

  // The lower halves of a panel row's bytes are its first 32 columns.
  template <class Vec, bool kUpper>
  [[gnu::always_inline]] static Vec lanes(const std::byte* row, int column) {
    return Vec::template look_up_u4<kUpper>(kValuesByCode<Nf4>.of, row + column);
  }
};

}  // namespace conclave::inline v0::quant

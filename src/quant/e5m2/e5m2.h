// e5m2: 8-bit floats with the exponents of f16 (core/float8.h has the conversion), largest 57344,
// with infinities. Rows may be e4m3, which rounds them less.
#pragma once

#include "core/float8.h"
#include "quant/e4m3/e4m3.h"
#include "quant/weight_format.h"

#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace conclave::inline v0::quant {

struct E5m2 {
  static constexpr std::string_view kName = "e5m2";
  static constexpr DType kElement = DType::kF8E5M2;
  static constexpr int64_t kBits = 8;
  static constexpr int kMantissaBits = 2;
  static constexpr float kLargest = kLargestE5m2;
  static constexpr bool kHasNan = true;
  static constexpr std::string_view kCompressedTensors = {};
  static constexpr WeightForm kForms[] = {
      {.name = "e5m2-channel", .dtype = kElement, .quant = {.weights = WeightScale::kChannel}}};
  using Rows = E4m3;

  static constexpr float decode(uint8_t code) { return e5m2_to_float(code); }
  static constexpr uint8_t encode(float value) { return float_to_e5m2(value); }
  static Support takes(const QuantSpec&) { return Support::yes(); }

  // A vector of the 32 columns of a half of a panel's row.
  template <class Vec, bool kUpper>
  [[gnu::always_inline]] static Vec lanes(const std::byte* row, int column) {
    return Vec::load_e5m2(row + (kUpper ? 32 : 0) + column);
  }
};

}  // namespace conclave::inline v0::quant

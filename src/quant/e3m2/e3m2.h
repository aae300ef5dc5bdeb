// e3m2: 6-bit floats with 3 exponent bits and 2 mantissa bits, largest 28; no infinity and no NaN.
// Rows are codes of it; matrices are read as e4m3, which has all its values.
#pragma once

#include "quant/small_float.h"

#include "conclave/dtype.h"

#include <cstdint>

namespace conclave::inline v0::quant {

struct E3m2 : SmallFloat<3, 2> {
  static constexpr DType kElement = DType::kF6E3M2;
  static constexpr int64_t kBits = 6;
  static constexpr int kMantissaBits = 2;
  static constexpr float kLargest = 28.0F;
  static constexpr bool kHasNan = false;
};

}  // namespace conclave::inline v0::quant

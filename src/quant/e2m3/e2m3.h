// e2m3: 6-bit floats with 2 exponent bits and 3 mantissa bits, largest 7.5; no infinity and no NaN.
// Rows are codes of it; matrices are read as e4m3, which has all its values.
#pragma once

#include "quant/small_float.h"

#include "conclave/dtype.h"

#include <cstdint>

namespace conclave::inline v0::quant {

struct E2m3 : SmallFloat<2, 3> {
  static constexpr DType kElement = DType::kF6E2M3;
  static constexpr int64_t kBits = 6;
  static constexpr int kMantissaBits = 3;
  static constexpr float kLargest = 7.5F;
  static constexpr bool kHasNan = false;
};

}  // namespace conclave::inline v0::quant

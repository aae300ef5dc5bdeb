// IEEE half precision: 5 bits of exponent, 10 of mantissa, largest finite value 65504.
#pragma once

#include "core/float_convert.h"

#include "conclave/dtype.h"

#include <cstdint>
#include <string_view>

namespace conclave::inline v0::quant {

struct F16Codec {
  static constexpr std::string_view kName = "f16";
  static constexpr DType kElement = DType::kF16;
  using Code = uint16_t;
  static float decode(Code code) { return f16_to_float(code); }
  static Code encode(float value) { return float_to_f16(value); }
};

}  // namespace conclave::inline v0::quant

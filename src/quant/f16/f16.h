// IEEE half precision: 5 bits of exponent, 10 of mantissa, largest finite value 65504.
#pragma once

#include "core/float_convert.h"

#include <cstdint>

namespace conclave::inline v0::quant {

struct F16Codec {
  using Code = uint16_t;
  static float decode(Code code) { return f16_to_float(code); }
  static Code encode(float value) { return float_to_f16(value); }
};

}  // namespace conclave::inline v0::quant

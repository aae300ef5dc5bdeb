// bfloat16: the upper half of a float32.
#pragma once

#include "core/float_convert.h"

#include "conclave/dtype.h"

#include <cstdint>
#include <string_view>

namespace conclave::inline v0::quant {

struct Bf16Codec {
  static constexpr std::string_view kName = "bf16";
  static constexpr DType kElement = DType::kBF16;
  using Code = uint16_t;
  static float decode(Code code) { return bf16_to_float(code); }
  static Code encode(float value) { return float_to_bf16(value); }
};

}  // namespace conclave::inline v0::quant

// IEEE single precision, stored as it is.
#pragma once

#include "conclave/dtype.h"

#include <string_view>

namespace conclave::inline v0::quant {

struct F32Codec {
  static constexpr std::string_view kName = "f32";
  static constexpr DType kElement = DType::kF32;
  using Code = float;
  static float decode(Code code) { return code; }
  static Code encode(float value) { return value; }
};

}  // namespace conclave::inline v0::quant

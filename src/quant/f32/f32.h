// IEEE single precision, stored as it is.
#pragma once

namespace conclave::inline v0::quant {

struct F32Codec {
  using Code = float;
  static float decode(Code code) { return code; }
  static Code encode(float value) { return value; }
};

}  // namespace conclave::inline v0::quant

// The quotient whose rounding to e4m3 is a value's code, by the rule of activation_rows.h, for
// device code too. A conversion that saturates follows: infinity, which only finite values beyond
// float32 give here, becomes 448, and values that are not finite have become NaN.
#pragma once

#include <cstdint>
#include <limits>

namespace conclave::inline v0::quant {

// value / step, divided exactly as the rule does.
constexpr float code_quotient(float value, float step) {
  // value * 0 is 0 with the value's sign, or NaN: it costs less than to ask and to select.
  return value / step + value * 0.0F;
}

// Many values share a step, and one division serves them all. The inverse of a step below 2^-128 is
// beyond float32, so such a step and the values it divides are multiplied by `factor` first.
struct InverseStep {
  float factor;
  float inverse;  // 1 / (step * factor)
};

constexpr InverseStep invert_step(float step) {
  const float factor = step < 0x1p-126F ? 0x1p64F : 1.0F;
  return {.factor = factor, .inverse = 1.0F / (step * factor)};
}

// value / step within 2^-22 of itself, or 2^-21 for steps above 2^126, whose inverse is subnormal.
constexpr float code_quotient(float value, const InverseStep& step) {
  return value * step.factor * step.inverse + value * 0.0F;
}

// The code of value / step in a format of formats.h, for its rows. Where no code stands for NaN,
// the scale of the row says that a value is not finite.
template <class Codes>
constexpr uint8_t row_code(float value, float step) {
  constexpr float kMost = std::numeric_limits<float>::max();
  const float quotient = code_quotient(value, step);
  // Infinity is a quotient beyond float32 here, and `encode` takes it for a value like that.
  return Codes::encode(quotient > kMost ? kMost : quotient < -kMost ? -kMost : quotient);
}

}  // namespace conclave::inline v0::quant

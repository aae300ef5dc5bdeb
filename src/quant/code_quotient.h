// The quotient whose rounding to e4m3 is a value's code, by the rule of activation_rows.h, for
// device code too. A conversion that saturates follows: infinity, which only finite values beyond
// float32 give here, becomes 448, and values that are not finite have become NaN.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace conclave::inline v0::quant {

// value / step, divided exactly as the rule does.
constexpr float code_quotient(float value, float step) {
  // value * 0 is 0 with the value's sign, or NaN: it costs less than to ask and to select.
  return value / step + value * 0.0F;
}

// The step of a row or group whose largest magnitude is `amax`, by the rule of activation_rows.h:
// amax / largest_code, or 1 if that is 0. `power_of_two` rounds it up to a normal power of two.
constexpr float step_of(float amax, float largest_code, bool power_of_two) {
  const float step = amax / largest_code;
  if (step == 0.0F) return 1.0F;
  if (!power_of_two || !(step <= std::numeric_limits<float>::max())) return step;
  // A finite step is far below the largest exponent, since codes are above 1.
  const uint32_t exponent = (std::bit_cast<uint32_t>(step) + 0x7fffffU) & 0x7f800000U;
  return std::bit_cast<float>(exponent);
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

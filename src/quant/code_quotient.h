// The quotient whose rounding to e4m3 is a value's code, by the rule of activation_rows.h, for
// device code too. A conversion that saturates follows: infinity, which only finite values beyond
// float32 give here, becomes 448, and values that are not finite have become NaN.
#pragma once

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

}  // namespace conclave::inline v0::quant

// The quotient whose rounding to e4m3 is a value's code, by the rule of activation_rows.h, for
// device code too. A conversion that saturates follows: infinity, which only finite values beyond
// float32 give here, becomes 448, and values that are not finite have become NaN.
#pragma once

#include "core/float8.h"

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

// The step of RowScaleRule::kFloorPower and its kin: the power of two at `amax`, divided by that at
// `largest_code`, where 2^-127 is the least; 1 for 0. The mantissa of `amax` is first rounded by
// adding `rounding` units of its last place.
constexpr float power_step(float amax, float largest_code, uint32_t rounding) {
  if (amax == 0.0F) return 1.0F;
  if (!(amax <= std::numeric_limits<float>::max())) return amax;
  const uint32_t own = (std::bit_cast<uint32_t>(amax) + rounding) >> 23;
  const uint32_t largest = (std::bit_cast<uint32_t>(largest_code) >> 23) - 127;
  return std::bit_cast<float>(own > largest ? (own - largest) << 23 : 0x400000U);
}
// The units that round a mantissa to so many bits, halves up, in place of an exponent's next power.
constexpr uint32_t mantissa_rounding(int mantissa_bits) {
  return uint32_t{1} << (22 - mantissa_bits);
}

// The units that bring all between two powers of two to the upper one.
inline constexpr uint32_t kRoundUp = (uint32_t{1} << 23) - 1;

// The step of RowScaleRule::kTwoLevel over `whole`, its t: a value of e4m3, 1 where none is left.
constexpr float two_level_ratio(float amax, float largest_code, float whole) {
  if (!(amax <= std::numeric_limits<float>::max())) return amax;
  const float ratio = amax / largest_code / whole;
  const float step = ratio < kLargestE4m3 ? e4m3_to_float(float_to_e4m3(ratio)) : kLargestE4m3;
  return step == 0.0F ? 1.0F : step;
}
constexpr float two_level_step(float amax, float largest_code, float whole) {
  if (!(amax <= std::numeric_limits<float>::max())) return amax;
  return two_level_ratio(amax, largest_code, whole) * whole;
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

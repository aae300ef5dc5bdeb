// ScaleValues::kSteps: numbers that are whole multiples, from -128 to 127, of one of their own.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace conclave::inline v0::quant {

// The number of which all are multiples; what it is if there is none means nothing.
float unit_of_steps(std::span<const float> numbers);

// The same for steps from 0 to `most`, where f16 holds the unit; nothing if there is none.
std::optional<float> unit_of_small_steps(std::span<const float> numbers, int most);

// Sets `step` and returns whether that many units have the bits of the number; no step has the sign
// of a zero, which changes no sum.
inline bool find_step(float number, float unit, int8_t& step) {
  const float multiple = unit == 0 ? 0.0F : number / unit;
  if (!(multiple >= -128.0F && multiple <= 127.0F)) return false;
  step = static_cast<int8_t>(multiple);
  return static_cast<float>(step) * unit == number;
}

}  // namespace conclave::inline v0::quant

// One float with the interface of the SIMD vectors, so that the scalar path runs the same
// templates.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace conclave::inline v0::activation {

struct ScalarFloat {
  float value;

  static ScalarFloat broadcast(float x) { return {x}; }
  static ScalarFloat add(ScalarFloat a, ScalarFloat b) { return {a.value + b.value}; }
  static ScalarFloat sub(ScalarFloat a, ScalarFloat b) { return {a.value - b.value}; }
  static ScalarFloat mul(ScalarFloat a, ScalarFloat b) { return {a.value * b.value}; }
  static ScalarFloat div(ScalarFloat a, ScalarFloat b) { return {a.value / b.value}; }
  static ScalarFloat fma(ScalarFloat a, ScalarFloat b, ScalarFloat c) {
    return {std::fma(a.value, b.value, c.value)};
  }
  // Returns the second operand if either is NaN, like the x86 instructions.
  static ScalarFloat max(ScalarFloat a, ScalarFloat b) { return a.value > b.value ? a : b; }
  static ScalarFloat min(ScalarFloat a, ScalarFloat b) { return a.value < b.value ? a : b; }
  static ScalarFloat negative_magnitude(ScalarFloat a) {
    return {std::bit_cast<float>(std::bit_cast<uint32_t>(a.value) | 0x80000000U)};
  }
  // Returns 2^n for t = 1.5 * 2^23 + n, n in [-126, 127].
  static ScalarFloat power_of_two(ScalarFloat t) {
    return {std::bit_cast<float>((std::bit_cast<uint32_t>(t.value) + 127U) << 23)};
  }
  // Returns b if the sign bit of a is set, otherwise c.
  static ScalarFloat select_negative(ScalarFloat a, ScalarFloat b, ScalarFloat c) {
    return (std::bit_cast<uint32_t>(a.value) >> 31) != 0 ? b : c;
  }
};

}  // namespace conclave::inline v0::activation

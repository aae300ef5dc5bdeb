// Computes distances in units in the last place.
#pragma once

#include <algorithm>
#include <cmath>

namespace conclave::testing {

// |actual - exact| in units in the last place of float32 at `exact`; subnormals have the unit
// 2^-149. It is infinite if only one of the two is infinite or NaN, but an infinity counts as
// reaching a value that overflows float32.
inline double ulp_error(float actual, double exact) {
  if (std::isnan(exact) || std::isnan(actual)) {
    return std::isnan(exact) && std::isnan(actual) ? 0.0 : HUGE_VAL;
  }
  if (std::isinf(actual))
    return static_cast<double>(static_cast<float>(exact)) == actual ? 0.0 : HUGE_VAL;
  int exponent = 0;
  std::frexp(exact, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - 24, -149));
  return std::fabs(static_cast<double>(actual) - exact) / unit;
}

}  // namespace conclave::testing

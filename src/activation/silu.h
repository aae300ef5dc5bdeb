// silu(x) = x sigmoid(x).
#pragma once

#include "activation/sigmoid.h"

#include <cmath>

namespace conclave::inline v0::activation {

struct Silu {
  // The result is within 4 units in the last place of float32 for every finite x, including
  // subnormal results. silu(-inf) is its limit -0, silu(+inf) is +inf, NaN stays NaN.
  template <class V>
  static V apply(V x) {
    // Below -110 the result rounds to -0 anyway, and the floor keeps -inf * 0 out; max and min
    // return their second operand if either is NaN.
    const V factor = V::max(V::broadcast(-110.0F), x);
    return times_sigmoid(factor, V::min(V::broadcast(110.0F), factor));
  }

  static double apply_reference(double x) { return x < -800.0 ? -0.0 : x / (1.0 + std::exp(-x)); }
};

}  // namespace conclave::inline v0::activation

// silu(g) * up, with silu(g) = g / (1 + exp(-g)).
#pragma once

#include "activation/exp.h"

#include <cmath>

namespace conclave::inline v0::activation {

struct Silu {
  // Within 3 units in the last place of float32 for every finite g, subnormal results included.
  // silu(-inf) is its limit -0, silu(+inf) is +inf, NaN stays NaN.
  template <class V>
  static V silu(V g) {
    // exp(-|g|) never overflows. Below -110 the result rounds to -0 anyway, and the floor keeps
    // -inf * 0 out; max returns its second operand where that is NaN.
    const V gate = V::max(V::broadcast(-110.0F), g);
    const V x = V::max(V::broadcast(-110.0F), V::negative_magnitude(gate));
    const SplitExp<V> e = split_exp(x);
    const V partial = V::mul(e.mantissa, e.scale_high);
    const V one = V::broadcast(1.0F);
    const V denominator = V::fma(partial, e.scale_low, one);
    // g < 0: g * exp(g) / (1 + exp(g)), scaled last so that only one rounding is subnormal.
    const V numerator = V::select_negative(gate, V::mul(gate, partial), gate);
    const V scale = V::select_negative(gate, e.scale_low, one);
    return V::mul(V::div(numerator, denominator), scale);
  }

  template <class V>
  static V apply(V gate, V up) {
    return V::mul(silu(gate), up);
  }

  static double apply_reference(double gate, double up) {
    const double silu = gate < -800.0 ? -0.0 : gate / (1.0 + std::exp(-gate));
    return silu * up;
  }
};

}  // namespace conclave::inline v0::activation

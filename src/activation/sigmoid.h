// factor * sigmoid(x), the part that silu, gelu_tanh, swiglu_oai and situ share.
#pragma once

#include "activation/exp.h"

namespace conclave::inline v0::activation {

// Computes factor * sigmoid(x) from the parts of exp(-|x|).
template <class V>
inline V weigh_by_sigmoid(V factor, V x, V mantissa, const SplitExp<V>& e) {
  const V partial = V::mul(mantissa, e.scale_high);
  const V one = V::broadcast(1.0F);
  const V denominator = V::fma(partial, e.scale_low, one);
  // x < 0: factor * exp(x) / (1 + exp(x)), scaled last so that only one rounding is subnormal.
  const V numerator = V::select_negative(x, V::mul(factor, partial), factor);
  const V scale = V::select_negative(x, e.scale_low, one);
  return V::mul(V::div(numerator, denominator), scale);
}

// Requires x in [-150, 150] or NaN, and a factor whose product with exp(-|x|) does not overflow.
template <class V>
inline V times_sigmoid(V factor, V x) {
  const SplitExp<V> e = split_exp(V::negative_magnitude(x));
  return weigh_by_sigmoid(factor, x, e.mantissa, e);
}

// The same for x + x_low, where |x_low| is at most half a unit in the last place of x: exp turns
// the absolute error of its argument into a relative one, up to 70 units at x = -100.
template <class V>
inline V times_sigmoid(V factor, V x, V x_low) {
  const SplitExp<V> e = split_exp(V::negative_magnitude(x));
  const V low = V::select_negative(x, x_low, V::sub(V::broadcast(0.0F), x_low));
  return weigh_by_sigmoid(factor, x, V::fma(e.mantissa, low, e.mantissa), e);
}

}  // namespace conclave::inline v0::activation

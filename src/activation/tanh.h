// scale * tanh(x / scale).
#pragma once

#include "activation/exp.h"

namespace conclave::inline v0::activation {

// The result is within 5 units in the last place of float32 for every x, including subnormal ones,
// and a scale in [0.001, 1e6]. It is -scale and scale at the infinities; NaN stays NaN.
template <class V>
inline V scaled_tanh(V x, float scale, float inverse_scale) {
  const V z = V::mul(x, V::broadcast(inverse_scale));
  const V minus_z = V::negative_magnitude(z);
  // tanh(10) rounds to 1.
  const SplitExp<V> e =
      split_exp(V::max(V::broadcast(-20.0F), V::mul(V::broadcast(2.0F), minus_z)));
  // exp(-2 |z|) - 1 is built from its parts, so that nothing cancels if z is small.
  const V power = V::mul(e.scale_high, e.scale_low);
  const V change = V::fma(power, e.fraction, V::sub(power, V::broadcast(1.0F)));
  const V minus_tanh = V::div(change, V::add(change, V::broadcast(2.0F)));
  const V bent =
      V::mul(minus_tanh, V::select_negative(x, V::broadcast(scale), V::broadcast(-scale)));
  // Below 2^-12 the bend is a third of a rounding, and a subnormal z has lost digits of x.
  const V above_small = V::sub(V::sub(V::broadcast(0.0F), minus_z), V::broadcast(0x1p-12F));
  return V::select_negative(above_small, x, bent);
}

}  // namespace conclave::inline v0::activation

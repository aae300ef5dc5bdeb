// gelu(x) = x Phi(x) = x (1 + erf(x / sqrt 2)) / 2, Phi being the normal distribution function.
#pragma once

#include "activation/exp.h"

#include <cmath>

namespace conclave::inline v0::activation {

struct Gelu {
  // The result is within 8 units in the last place of float32 for every finite x, including
  // subnormal results. gelu(-inf) is its limit -0, gelu(+inf) is +inf, NaN stays NaN.
  template <class V>
  static V apply(V x) {
    // Below -15 the result rounds to -0 anyway, and the floor keeps -inf * 0 out.
    const V floor = V::broadcast(-15.0F);
    const V zero = V::broadcast(0.0F);
    const V factor = V::max(floor, x);
    const V magnitude = V::sub(zero, V::max(floor, V::negative_magnitude(factor)));

    // exp(-x^2 / 2) with the part of x^2 that its rounding loses: exp would magnify it.
    const V square = V::mul(magnitude, magnitude);
    const V square_low = V::fma(magnitude, magnitude, V::sub(zero, square));
    const V minus_half = V::broadcast(-0.5F);
    const SplitExp<V> e = split_exp(V::mul(minus_half, square));
    const V mantissa = V::fma(e.mantissa, V::mul(minus_half, square_low), e.mantissa);

    // Phi(-|x|) / scale_low.
    const V tail = V::mul(V::mul(mantissa, tail_over_exp(magnitude)), e.scale_high);
    // For x < 0 the scale comes last, so that only one rounding is subnormal.
    const V below = V::mul(V::mul(factor, tail), e.scale_low);
    const V above = V::mul(factor, V::fma(V::sub(zero, tail), e.scale_low, V::broadcast(1.0F)));
    return V::select_negative(factor, below, above);
  }

  static double apply_reference(double x) {
    return x < -40.0 ? -0.0 : 0.5 * x * std::erfc(-x * std::sqrt(0.5));
  }

 private:
  // Phi(-x) exp(x^2 / 2) for x in [0, 15], as a ratio of polynomials fitted for the least relative
  // error, 6.3e-9. All coefficients are positive, so nothing cancels.
  template <class V>
  static V tail_over_exp(V x) {
    V above = V::broadcast(0x1.102ec6p-8F);
    above = V::fma(above, x, V::broadcast(0x1.4ee544p-5F));
    above = V::fma(above, x, V::broadcast(0x1.78c456p-3F));
    above = V::fma(above, x, V::broadcast(0x1.c1d336p-2F));
    above = V::fma(above, x, V::broadcast(0.5F));
    V below = V::broadcast(0x1.552076p-7F);
    below = V::fma(below, x, V::broadcast(0x1.a3c12p-4F));
    below = V::fma(below, x, V::broadcast(0x1.e2b854p-2F));
    below = V::fma(below, x, V::broadcast(0x1.349e92p+0F));
    below = V::fma(below, x, V::broadcast(0x1.ad2bccp+0F));
    below = V::fma(below, x, V::broadcast(1.0F));
    return V::div(above, below);
  }
};

}  // namespace conclave::inline v0::activation

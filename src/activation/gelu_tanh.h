// gelu_tanh(x) = x (1 + tanh(z)) / 2 = x sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3).
#pragma once

#include "activation/sigmoid.h"

#include <cmath>

namespace conclave::inline v0::activation {

struct GeluTanh {
  // The result is within 4 units in the last place of float32 for every finite x, including
  // subnormal results. gelu_tanh(-inf) is its limit -0, gelu_tanh(+inf) is +inf, NaN stays NaN.
  template <class V>
  static V apply(V x) {
    // Below -11 the result rounds to -0 anyway, and the floor keeps -inf * 0 out.
    const V factor = V::max(V::broadcast(-11.0F), x);
    const V t = V::min(V::broadcast(11.0F), factor);

    // 2 z = t (a + b t^2) in two floats: exp magnifies the error of its argument.
    const V zero = V::broadcast(0.0F);
    const V a = V::broadcast(0x1.988454p+0F);
    const V b = V::broadcast(0x1.2444f2p-4F);
    const V square = V::mul(t, t);
    const V square_low = V::fma(t, t, V::sub(zero, square));
    const V cubic = V::mul(b, square);
    V cubic_low = V::fma(b, square, V::sub(zero, cubic));
    cubic_low = V::fma(b, square_low, cubic_low);
    cubic_low = V::fma(V::broadcast(0x1.49b16ap-29F), square, cubic_low);
    // a + cubic and exactly what its rounding loses, whichever of the two is larger.
    const V sum = V::add(cubic, a);
    const V a_part = V::sub(sum, cubic);
    const V lost = V::add(V::sub(cubic, V::sub(sum, a_part)), V::sub(a, a_part));
    const V sum_low = V::add(V::add(lost, cubic_low), V::broadcast(-0x1.857936p-25F));
    const V product = V::mul(t, sum);
    const V product_low = V::fma(t, sum_low, V::fma(t, sum, V::sub(zero, product)));
    return times_sigmoid(factor, product, product_low);
  }

  static double apply_reference(double x) {
    if (x < -40.0) return -0.0;
    const double z = std::sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x);
    return x / (1.0 + std::exp(-2.0 * z));
  }
};

}  // namespace conclave::inline v0::activation

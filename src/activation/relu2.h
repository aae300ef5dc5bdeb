// relu2(x) = max(x, 0)^2.
#pragma once

namespace conclave::inline v0::activation {

struct Relu2 {
  // The result is rounded once. NaN stays NaN.
  template <class V>
  static V apply(V x) {
    const V positive = V::max(V::broadcast(0.0F), x);
    return V::mul(positive, positive);
  }
  static double apply_reference(double x) { return x < 0.0 ? 0.0 : x * x; }
};

}  // namespace conclave::inline v0::activation

// situ: beta tanh(g / beta) sigmoid(g) u', u' = lb tanh(u / lb), or u itself.
#pragma once

#include "activation/parameters.h"
#include "activation/sigmoid.h"
#include "activation/tanh.h"

#include <cmath>

namespace conclave::inline v0::activation {

template <bool kBendsUp>
struct Situ {
  static constexpr bool kGated = true;

  // The gate's part is within 7 units in the last place of float32, a bent up within 5.
  template <class V>
  static V apply(V gate, V up, const FormulaParameters& p) {
    const V x = V::max(V::broadcast(-130.0F), V::min(V::broadcast(130.0F), gate));
    const V weighed = times_sigmoid(scaled_tanh(gate, p.beta, p.inverse_beta), x);
    if constexpr (kBendsUp) {
      return V::mul(weighed, scaled_tanh(up, p.linear_beta, p.inverse_linear_beta));
    } else {
      return V::mul(weighed, up);
    }
  }

  static double apply_reference(double gate, double up, const FormulaParameters& p) {
    const double bent = bend(gate, p.beta) / (1.0 + std::exp(-gate));
    return bent * (kBendsUp ? bend(up, p.linear_beta) : up);
  }

 private:
  static double bend(double x, double scale) { return scale * std::tanh(x / scale); }
};

}  // namespace conclave::inline v0::activation

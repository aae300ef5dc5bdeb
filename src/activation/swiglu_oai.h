// swiglu_oai: (clamp(u, -L, L) + beta) g' sigmoid(alpha g'), g' = min(g, L).
#pragma once

#include "activation/clamp.h"
#include "activation/parameters.h"
#include "activation/sigmoid.h"

#include <cmath>

namespace conclave::inline v0::activation {

struct SwigluOai {
  static constexpr bool kGated = true;

  // The gate's part is within 5 units in the last place of float32; the sum with beta rounds once.
  template <class V>
  static V apply(V gate, V up, const FormulaParameters& p) {
    return V::mul(weigh_gate(at_most(gate, p.limit), p),
                  V::add(within(up, p.limit), V::broadcast(p.beta)));
  }

  static double apply_reference(double gate, double up, const FormulaParameters& p) {
    const double g = at_most(gate, p.limit);
    const double x = double{p.alpha} * g;
    const double weighed = x < -800.0 ? -0.0 : g / (1.0 + std::exp(-x));
    return weighed * (within(up, p.limit) + double{p.beta});
  }

 private:
  template <class V>
  static V weigh_gate(V gate, const FormulaParameters& p) {
    // At alpha g = -130 the result rounds to -0 for every alpha >= 0.001.
    const float bound = 130.0F / p.alpha;
    const V factor = V::max(V::broadcast(-bound), gate);
    const V g = V::min(V::broadcast(bound), factor);
    const V alpha = V::broadcast(p.alpha);
    const V x = V::mul(alpha, g);
    return times_sigmoid(factor, x, V::fma(alpha, g, V::sub(V::broadcast(0.0F), x)));
  }
};

}  // namespace conclave::inline v0::activation

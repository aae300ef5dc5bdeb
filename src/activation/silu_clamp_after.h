// silu_clamp_after: min(silu(g), L) clamp(u, -L, L).
#pragma once

#include "activation/clamp.h"
#include "activation/parameters.h"
#include "activation/silu.h"

namespace conclave::inline v0::activation {

struct SiluClampAfter {
  static constexpr bool kGated = true;

  template <class V>
  static V apply(V gate, V up, const FormulaParameters& p) {
    return V::mul(at_most(Silu::apply(gate), p.limit), within(up, p.limit));
  }
  static double apply_reference(double gate, double up, const FormulaParameters& p) {
    return at_most(Silu::apply_reference(gate), p.limit) * within(up, p.limit);
  }
};

}  // namespace conclave::inline v0::activation

// silu_clamp_before: silu(min(g, L)) clamp(u, -L, L).
#pragma once

#include "activation/clamp.h"
#include "activation/parameters.h"
#include "activation/silu.h"

namespace conclave::inline v0::activation {

struct SiluClampBefore {
  static constexpr bool kGated = true;

  template <class V>
  static V apply(V gate, V up, const FormulaParameters& p) {
    return V::mul(Silu::apply(at_most(gate, p.limit)), within(up, p.limit));
  }
  static double apply_reference(double gate, double up, const FormulaParameters& p) {
    return Silu::apply_reference(at_most(gate, p.limit)) * within(up, p.limit);
  }
};

}  // namespace conclave::inline v0::activation

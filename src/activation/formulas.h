// Every formula, and the way from an Activation to its type.
//
// A formula has kGated, apply(gate, up, parameters) over a vector type and, in float64,
// apply_reference. Formulas without a gate take their only product as `up` and ignore `gate`.
#pragma once

#include "activation/activations.h"
#include "activation/gelu.h"
#include "activation/gelu_tanh.h"
#include "activation/parameters.h"
#include "activation/relu2.h"
#include "activation/silu.h"
#include "activation/silu_clamp_after.h"
#include "activation/silu_clamp_before.h"
#include "activation/situ.h"
#include "activation/swiglu_oai.h"

namespace conclave::inline v0::activation {

// Applies F to the gate and multiplies by up.
template <class F>
struct Gated {
  static constexpr bool kGated = true;

  template <class V>
  static V apply(V gate, V up, const FormulaParameters& /*parameters*/) {
    return V::mul(F::apply(gate), up);
  }
  static double apply_reference(double gate, double up, const FormulaParameters& /*parameters*/) {
    return F::apply_reference(gate) * up;
  }
};

// Applies F to the only product.
template <class F>
struct WithoutGate {
  static constexpr bool kGated = false;

  template <class V>
  static V apply(V /*gate*/, V up, const FormulaParameters& /*parameters*/) {
    return F::apply(up);
  }
  static double apply_reference(double /*gate*/, double up,
                                const FormulaParameters& /*parameters*/) {
    return F::apply_reference(up);
  }
};

// Calls visitor.template visit<Formula>() with the activation's formula.
template <class Visitor>
auto with_formula(const Activation& activation, const Visitor& visitor) {
  switch (activation.id) {
    case ActivationId::kGelu:
      return visitor.template visit<Gated<Gelu>>();
    case ActivationId::kGeluTanh:
      return visitor.template visit<Gated<GeluTanh>>();
    case ActivationId::kSwigluOai:
      return visitor.template visit<SwigluOai>();
    case ActivationId::kSiluClampBefore:
      return visitor.template visit<SiluClampBefore>();
    case ActivationId::kSiluClampAfter:
      return visitor.template visit<SiluClampAfter>();
    case ActivationId::kSitu:
      return activation.linear_beta > 0 ? visitor.template visit<Situ<true>>()
                                        : visitor.template visit<Situ<false>>();
    case ActivationId::kSiluNoMul:
      return visitor.template visit<WithoutGate<Silu>>();
    case ActivationId::kGeluNoMul:
      return visitor.template visit<WithoutGate<Gelu>>();
    case ActivationId::kGeluTanhNoMul:
      return visitor.template visit<WithoutGate<GeluTanh>>();
    case ActivationId::kRelu2NoMul:
      return visitor.template visit<WithoutGate<Relu2>>();
    case ActivationId::kSilu:
      break;
  }
  return visitor.template visit<Gated<Silu>>();
}

}  // namespace conclave::inline v0::activation

// An activation as a kernel parameter.
#pragma once

#include "activation/activations.h"
#include "activation/parameters.h"

namespace conclave::inline v0::activation {

struct DeviceActivation {
  ActivationId id = ActivationId::kSilu;
  bool gated = true;
  bool bends_up = false;  // for situ: linear_beta is given
  FusedForm fused = FusedForm::kSilu;
  FormulaParameters parameters;
};

inline DeviceActivation device_activation(const Activation& activation) noexcept {
  return {.id = activation.id,
          .gated = activation.gated,
          .bends_up = activation.linear_beta > 0,
          .fused = activation.fused,
          .parameters = formula_parameters(activation)};
}

}  // namespace conclave::inline v0::activation

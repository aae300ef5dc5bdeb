// Every activation with usable parameters, and the accuracy of each in float32.
#pragma once

#include "activation/activations.h"

#include "conclave/spec.h"

#include <vector>

namespace conclave::testing {

// Each name of the list at least once, and both forms of those with an optional parameter.
inline std::vector<ActivationSpec> all_activations() {
  return {{.name = "silu"},
          {.name = "gelu"},
          {.name = "gelu_tanh"},
          {.name = "swiglu_oai", .limit = 7.0, .alpha = 1.702, .beta = 1.0},
          {.name = "swiglu_oai", .alpha = 1.25, .beta = 0.5},
          {.name = "silu_clamp_before", .limit = 1.0},
          {.name = "silu_clamp_after", .limit = 0.7},
          {.name = "situ", .beta = 4.0, .linear_beta = 25.0},
          {.name = "situ", .beta = 1.3},
          {.name = "silu_no_mul"},
          {.name = "gelu_no_mul"},
          {.name = "gelu_tanh_no_mul"},
          {.name = "relu2_no_mul"}};
}

// Units in the last place of float32 by which the part of the formula that bends may be off if the
// other factor is exact; promised beside each formula in src/activation, derived in
// docs/numerics.md.
inline double activation_ulp(activation::ActivationId id) {
  using activation::ActivationId;
  switch (id) {
    case ActivationId::kGelu:
    case ActivationId::kGeluNoMul:
      return 8.0;
    case ActivationId::kSwigluOai:
      return 5.0;
    case ActivationId::kSitu:
      return 7.0;
    case ActivationId::kRelu2NoMul:
      return 0.5;
    default:
      return 4.0;
  }
}

}  // namespace conclave::testing

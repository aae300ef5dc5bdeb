// The parameters of a formula as float32 numbers, ready for use.
#pragma once

#include <limits>

namespace conclave::inline v0::activation {

// Fields that a formula does not have keep these values, with which swiglu_oai's formula is silu,
// and with a limit silu_clamp_before: adding -0 leaves even zeros unchanged.
struct FormulaParameters {
  float limit = std::numeric_limits<float>::infinity();  // no clamp
  float alpha = 1.0F;
  float beta = -0.0F;
  float inverse_beta = 1.0F;
  float linear_beta = 1.0F;
  float inverse_linear_beta = 1.0F;
};

}  // namespace conclave::inline v0::activation

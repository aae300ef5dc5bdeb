// This says what follows from a QuantSpec, whatever its formats.
#pragma once

#include "conclave/spec.h"

#include <cstdint>

namespace conclave::inline v0 {

// Columns of a row that share the t of ScaleValues::kSteps.
inline constexpr int64_t kStepColumns = 256;

// Whether matrices have the plane WeightPlane::kInputScale: steps of rows that a checkpoint states.
inline bool has_input_scale(const QuantSpec& quant) {
  return quant.activations == ActivationScale::kTensorStatic ||
         quant.activation_scale_rule == RowScaleRule::kTwoLevel;
}

}  // namespace conclave::inline v0

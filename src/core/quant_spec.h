// These functions say what the types of a layer's matrices and their quantisation imply.
#pragma once

#include "conclave/spec.h"

namespace conclave::inline v0 {

// Throws Error(kDType) for a type that is no weight type, and Error(kInvalidArgument) for
// quantisation without weights that are codes, codes without quantisation, or values out of range;
// both name the field, the value and the limit. Defined where the formats are, in quant.
void validate_quant(const MoeSpec& spec);

// Whether matrices have the plane WeightPlane::kInputScale: steps of rows that a checkpoint states.
inline bool has_input_scale(const QuantSpec& quant) {
  return quant.activations == ActivationScale::kTensorStatic ||
         quant.activation_scale_rule == RowScaleRule::kTwoLevel;
}

// count_parameters for any spec whose sizes are in range, valid or not, so that a layer that does
// not run can still be listed. Throws Error(kSizeOverflow). Defined there too.
ParameterCount count_weights(const MoeSpec& spec);

}  // namespace conclave::inline v0

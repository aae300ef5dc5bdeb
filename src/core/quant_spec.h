// Checks the types of a layer's matrices and their quantisation.
#pragma once

#include "conclave/spec.h"

namespace conclave::inline v0 {

// Throws Error(kDType) for a type that is no weight type, and Error(kInvalidArgument) for
// quantisation without e4m3 weights, e4m3 weights without quantisation, or values out of range;
// both name the field, the value and the limit.
void validate_quant(const MoeSpec& spec);

}  // namespace conclave::inline v0

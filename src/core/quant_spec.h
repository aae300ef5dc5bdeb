// The checks of the types of a layer's matrices and of their quantisation.
#pragma once

#include "conclave/spec.h"

namespace conclave::inline v0 {

// Throws Error(kDType) for a type that is no weight type, Error(kInvalidArgument) for quantisation
// without e4m3 weights, e4m3 weights without it, and values out of range; both name field, value
// and limit.
void validate_quant(const MoeSpec& spec);

}  // namespace conclave::inline v0

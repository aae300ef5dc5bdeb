// This checks the types of a layer's matrices and their quantisation.
#pragma once

#include "conclave/spec.h"

namespace conclave::inline v0::quant {

// Throws Error(kDType) for a type that is no weight type, and Error(kInvalidArgument) for
// quantisation without weights that are codes, codes without quantisation, or values out of range;
// both name the field, the value and the limit.
void check_quant(const MoeSpec& spec);

}  // namespace conclave::inline v0::quant

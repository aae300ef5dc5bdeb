// Checks of RouterSpec, as part of validate(MoeSpec).
#pragma once

#include "conclave/spec.h"

namespace conclave::inline v0 {

// Expects the sizes of `spec` to be checked already. Throws Error(kInvalidArgument or kDType)
// naming the field, its value and the limit. Fields of a custom router are checked for range only:
// what it uses is its own business.
void validate_router(const MoeSpec& spec);

}  // namespace conclave::inline v0

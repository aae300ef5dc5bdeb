// Checks RouterSpec, as part of validate(MoeSpec).
#pragma once

#include "conclave/spec.h"

namespace conclave::inline v0 {

// Expects that the sizes in `spec` have been checked. Throws Error(kInvalidArgument or kDType)
// naming the field, its value and the limit. Fields of a custom router are only checked for range,
// since the router decides which ones it uses.
void validate_router(const MoeSpec& spec);

}  // namespace conclave::inline v0

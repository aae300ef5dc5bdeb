// This checks what the router of a spec reads and takes, which only the catalog knows.
#pragma once

#include "conclave/spec.h"

namespace conclave::inline v0::routing {

// Throws Error(kInvalidArgument; kDType for a type) naming the field of RouterSpec, or of the spec
// beside it, the value and the limit. All else of the spec has been checked. Fields of a router of
// the application are only checked for range, since it decides which ones it uses.
void check_router(const MoeSpec& spec);

}  // namespace conclave::inline v0::routing

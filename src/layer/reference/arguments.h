// Checks the oracle's arguments, so that it never reads what is not there.
#pragma once

#include "conclave/reference.h"
#include "conclave/spec.h"

namespace conclave::inline v0 {

// Checks shapes and types, and that there is something to route by. Throws as check_arguments of a
// layer; float64 is allowed beside the layer's types.
void check_reference_arguments(const ReferenceArgs& args, const MoeSpec& spec);

}  // namespace conclave::inline v0

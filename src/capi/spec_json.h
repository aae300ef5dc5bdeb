// A spec as JSON text: the members of the struct by their names, in depth.
#pragma once

#include "capi/json_text.h"

#include "conclave/spec.h"

#include <string>

namespace conclave::inline v0::capi {

// Throws Error naming the member: kJson* for the text, kInvalidArgument for a member that does not
// exist or a number out of range, kUnknownName, kDType.
MoeSpec spec_of_json(const std::string& text);
Json json_of_spec(const MoeSpec& spec);

}  // namespace conclave::inline v0::capi

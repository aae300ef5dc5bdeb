// Describes the stages of a plan in words, for `explain`.
#pragma once

#include "layer/plan.h"

#include <string>
#include <vector>

namespace conclave::inline v0 {

// Returns the stages in the order of a forward.
std::vector<std::string> describe_stages(const LayerPlan& plan);

}  // namespace conclave::inline v0

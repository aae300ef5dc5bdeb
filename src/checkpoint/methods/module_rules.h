// Rules of a configuration for some modules: whether one of them speaks of routed experts.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

// Whether an expression of Python's `re` matches the text from its begin. It knows what such rules
// are written with: characters, classes, groups, alternatives, repeats and anchors. With anything
// else it may match: better one rule too many than one too few. Its time is bounded.
bool may_match(std::string_view expression, std::string_view text);

// Names of routed experts' modules as families have them, of several layers and experts.
const std::vector<std::string>& expert_modules();

// Whether the expression may match one of them.
bool names_experts(std::string_view expression);

}  // namespace conclave::inline v0::checkpoint

// Rules of a configuration for some modules: whether one of them speaks of routed experts, and
// which scheme a module has.
#pragma once

#include "checkpoint/methods/method.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

// Whether an expression of Python's `re` matches the text from its begin. It knows what such rules
// are written with: characters, classes, groups, alternatives, repeats and anchors. With anything
// else it cannot be told. Its time is bounded.
std::optional<bool> matches(std::string_view expression, std::string_view text);

// Names of routed experts' modules as families have them, of several layers and experts.
const std::vector<std::string>& expert_modules();

// The scheme of a module; null if it stays as it is. Throws NotRead for an expression that is not
// understood.
const ModuleScheme* scheme_of(const ModuleSchemes& schemes, std::string_view module);

// Whether layers read the two in different ways, or one of them not at all.
bool differ(const ModuleScheme& one, const ModuleScheme& other);

// What a method reads: the scheme of all modules where there is one, else one of routed experts,
// with all others. Throws NotRead where routed experts have a scheme that is not read.
QuantizedWeights of_modules(ModuleSchemes schemes);

}  // namespace conclave::inline v0::checkpoint

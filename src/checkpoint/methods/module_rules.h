// Rules of a configuration for some modules: whether one of them speaks of routed experts, and
// which scheme a module has.
#pragma once

#include "checkpoint/methods/method.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

// Whether an expression of Python's `re` matches the text from its begin. It knows what such rules
// are written with: characters, classes, groups, alternatives, repeats, anchors, ends of words and
// what follows or does not. With anything else it cannot be told. Its time is bounded.
std::optional<bool> matches(std::string_view expression, std::string_view text);

// Names of routed experts' modules as families have them, of several layers and experts.
const std::vector<std::string>& expert_modules();

// How it is known that a rule leaves a module out.
enum class LeftOut : uint8_t {
  kByTensors,  // files have its values, so that these rules are not asked
  kByRules,
};

// The scheme of a module; null if it stays as it is. Throws NotRead for an expression that is not
// understood.
const ModuleScheme* scheme_of(const ModuleSchemes& schemes, std::string_view module,
                              LeftOut left_out = LeftOut::kByTensors);

// Rules of these modules, by names alone, as one; nothing if they stay as they are. Throws NotRead
// if they differ, or have a scheme that is not read.
std::optional<QuantizedWeights> weights_of_modules(const QuantizedWeights& all,
                                                   std::span<const std::string> modules);

// Whether layers read the two in different ways, or one of them not at all.
bool differ(const ModuleScheme& one, const ModuleScheme& other);

// A method reads one scheme of all modules where there is one, else one of routed experts, with all
// others. Throws NotRead where routed experts have a scheme that is not read.
QuantizedWeights of_modules(ModuleSchemes schemes);

}  // namespace conclave::inline v0::checkpoint

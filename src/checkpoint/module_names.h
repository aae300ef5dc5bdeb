// Names of modules, by which configurations give them schemes.
#pragma once

#include "checkpoint/methods/method.h"

#include <string>
#include <string_view>

namespace conclave::inline v0::checkpoint {

// `quant` has schemes by module in all of these.

// The module that a tensor belongs to: all before its last component, or the name of a stack.
std::string module_of(const QuantizedWeights& quant, std::string_view name);

// The scheme of a module, or of the one that a tensor belongs to; null: none. A stack goes by the
// rules for its experts' modules. Throws NotRead as scheme_of.
const ModuleScheme* scheme_of_module(const QuantizedWeights& quant, const std::string& module);
const ModuleScheme* scheme_of_tensor(const QuantizedWeights& quant, std::string_view name);

}  // namespace conclave::inline v0::checkpoint

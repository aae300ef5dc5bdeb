#include "checkpoint/module_names.h"

#include "checkpoint/methods/module_rules.h"
#include "checkpoint/scale_names.h"
#include "checkpoint/stored_planes.h"

#include <algorithm>
#include <array>

namespace conclave::inline v0::checkpoint {
namespace {

// Last components of the names of tensors that belong to a module; in stacks the module's name
// comes last.
bool is_leaf(std::string_view component) {
  constexpr std::array<std::string_view, 12> kLeaves = {"bias",
                                                        "qweight",
                                                        "qzeros",
                                                        "scales",
                                                        "scale",
                                                        "g_idx",
                                                        "pre_quant_scale",
                                                        "input_scale",
                                                        "activation_scale",
                                                        "input_global_scale",
                                                        "input_zero_point"};
  return component.starts_with("weight") || std::ranges::find(kLeaves, component) != kLeaves.end();
}

std::string_view last_component(std::string_view name) {
  const size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? name : name.substr(dot + 1);
}

// The stack that a plane belongs to, by the name of the plane.
std::string stack_of(const QuantizedWeights& quant, std::string_view name) {
  for (const ModuleScheme& scheme : quant.by_module->schemes) {
    const auto matrix = matrix_name(scheme.weights, name);
    if (matrix) return *matrix;
    const auto stored = stored_names(scheme.weights, name);
    if (!stored.empty()) return stored.front().matrix;
  }
  const auto scales = scale_names(name);
  return scales.empty() ? std::string(name) : scales.front().matrix;
}

// A stack goes by rules for its experts' modules, if there is none for itself.
std::string as_expert(const std::string& module) {
  constexpr std::string_view kExperts = ".experts.";
  const size_t at = module.find(kExperts);
  if (at == std::string::npos) return module;
  const size_t after = at + kExperts.size();
  if (after < module.size() && module[after] >= '0' && module[after] <= '9') return module;
  std::string name = module;
  name.insert(after, "0.");
  const size_t fused = name.find("gate_up_proj");
  if (fused != std::string::npos) name.replace(fused, 12, "gate_proj");
  return name;
}

}  // namespace

std::string module_of(const QuantizedWeights& quant, std::string_view name) {
  if (is_leaf(last_component(name))) return std::string(name.substr(0, name.rfind('.')));
  std::string module = stack_of(quant, name);
  constexpr std::string_view kWeight = ".weight";
  if (module.ends_with(kWeight)) module.resize(module.size() - kWeight.size());
  return module;
}

const ModuleScheme* scheme_of_module(const QuantizedWeights& quant, const std::string& module) {
  return scheme_of(*quant.by_module, as_expert(module));
}

const ModuleScheme* scheme_of_tensor(const QuantizedWeights& quant, std::string_view name) {
  return scheme_of_module(quant, module_of(quant, name));
}

}  // namespace conclave::inline v0::checkpoint

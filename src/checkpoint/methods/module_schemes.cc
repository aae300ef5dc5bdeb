// Schemes of modules: which rule holds for a name, and what a method reads if there are several.
#include "checkpoint/methods/module_rules.h"
#include "io/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

namespace conclave::inline v0::checkpoint {
namespace {

using Kind = ModuleRule::Kind;

// No model has more; this bounds the time that names of modules take.
constexpr size_t kMaxRules = 256;

// The first item of a pattern but a star: a letter, ? for any, or a set as [0-9a] or [!x] that a
// bracket ends. Without one the set is the letter [, as for Python's fnmatch.
struct PatternItem {
  std::string_view set;  // empty: a letter
  bool is_letter = true;
  bool leaves_out = false;
  size_t length = 1;

  explicit PatternItem(std::string_view pattern) {
    if (pattern.front() != '[') return;
    const size_t first = pattern.substr(1).starts_with('!') ? 2 : 1;
    // A bracket that comes first is one of the set.
    const size_t end = pattern.find(']', first + 1);
    if (end == std::string_view::npos) return;
    is_letter = false;
    leaves_out = first == 2;
    set = pattern.substr(first, end - first);
    length = end + 1;
  }

  bool fits(char item, char letter) const {
    if (is_letter) return item == '?' || item == letter;
    bool found = false;
    for (size_t i = 0; i < set.size(); ++i) {
      const bool is_range = i + 2 < set.size() && set[i + 1] == '-';
      const char last = is_range ? set[i + 2] : set[i];
      found |= set[i] <= letter && letter <= last;
      if (is_range) i += 2;
    }
    return found != leaves_out;
  }
};

// Whether the text fits a pattern with * for any letters. Only the last star can need another try,
// so that time is bounded by the product of both lengths.
bool fits_pattern(std::string_view pattern, std::string_view text) {
  size_t at = 0;
  size_t star = std::string_view::npos;
  size_t begin = 0;
  for (size_t i = 0; i < text.size();) {
    if (at < pattern.size() && pattern[at] == '*') {
      star = at++;
      begin = i;
      continue;
    }
    if (at < pattern.size()) {
      const PatternItem item(pattern.substr(at));
      if (item.fits(pattern[at], text[i])) {
        at += item.length;
        ++i;
        continue;
      }
    }
    if (star == std::string_view::npos) return false;
    at = star + 1;
    i = ++begin;
  }
  return pattern.substr(at).find_first_not_of('*') == std::string_view::npos;
}

bool fits_expression(std::string_view expression, std::string_view module) {
  const std::optional<bool> found = matches(expression, module);
  if (!found) throw NotRead{"modules by the expression " + io::show_name(std::string(expression))};
  return *found;
}

bool holds(const ModuleRule& rule, std::string_view module) {
  switch (rule.kind) {
    case Kind::kName:
      return module == rule.text || module.ends_with("." + rule.text);
    case Kind::kExpression:
      return fits_expression(rule.text, module);
    case Kind::kPattern:
      return fits_pattern(rule.text, module);
    case Kind::kAny:
      break;
  }
  return true;
}

// True if a layer reads the same of two schemes. Notes do not count.
bool same(const QuantizedWeights& one, const QuantizedWeights& other) {
  const bool same_storage = one.planes.data() == other.planes.data() &&
                            one.stored.bits == other.stored.bits &&
                            one.stored.zeros_less_one == other.stored.zeros_less_one &&
                            one.stored.flat_block == other.stored.flat_block;
  return same_storage && one.element == other.element && one.spec == other.spec;
}

bool all_same(const ModuleSchemes& found) {
  const auto& first = found.schemes.front().weights;
  return first && std::ranges::all_of(found.schemes, [&](const ModuleScheme& scheme) {
           return scheme.weights && same(*first, *scheme.weights);
         });
}

// Whether a name is that of routed experts, in stacks or not.
bool names_experts(const std::string& module) {
  return module.find(".experts") != std::string::npos ||
         module.find(".switch_mlp") != std::string::npos;
}

// Modules of a scheme that is not read may lie outside the MoE blocks: only experts count.
void check_experts(const ModuleSchemes& found) {
  for (const auto& [name, scheme] : found.by_name) {
    if (names_experts(name) && !found.schemes[scheme].weights)
      throw NotRead{found.schemes[scheme].reason};
  }
  for (const std::string& module : expert_modules()) {
    const ModuleScheme* const scheme = scheme_of(found, module);
    if (scheme != nullptr && !scheme->weights) throw NotRead{scheme->reason};
  }
}

// A scheme of routed experts, or without any the first that is read.
const ModuleScheme& usual_scheme(const ModuleSchemes& found) {
  for (const auto& [name, scheme] : found.by_name) {
    if (names_experts(name)) return found.schemes[scheme];
  }
  for (const std::string& module : expert_modules()) {
    if (const ModuleScheme* const scheme = scheme_of(found, module)) return *scheme;
  }
  for (const ModuleScheme& scheme : found.schemes) {
    if (scheme.weights) return scheme;
  }
  throw NotRead{found.schemes.front().reason};
}

}  // namespace

const ModuleScheme* scheme_of(const ModuleSchemes& schemes, std::string_view module,
                              LeftOut left_out) {
  const bool has_names = !schemes.by_name.empty() || !schemes.left_out.empty();
  for (std::string_view start = module; has_names && !start.empty();) {
    const auto found = schemes.by_name.find(start);
    if (found != schemes.by_name.end()) return &schemes.schemes[found->second];
    if (left_out == LeftOut::kByRules && schemes.left_out.contains(start)) return nullptr;
    const size_t dot = start.rfind('.');
    start = dot == std::string_view::npos ? std::string_view() : start.substr(0, dot);
  }
  for (const ModuleRule& rule : schemes.rules) {
    if (rule.leaves_out && left_out == LeftOut::kByTensors) continue;
    if (holds(rule, module)) return rule.leaves_out ? nullptr : &schemes.schemes[rule.scheme];
  }
  return nullptr;
}

std::optional<QuantizedWeights> weights_of_modules(const QuantizedWeights& all,
                                                   std::span<const std::string> modules) {
  if (all.modules == nullptr || modules.empty()) return all;
  const auto scheme = [&](const std::string& module) {
    return scheme_of(*all.modules, module, LeftOut::kByRules);
  };
  const ModuleScheme* const first = scheme(modules.front());
  for (const std::string& module : modules.subspan(1)) {
    const ModuleScheme* const other = scheme(module);
    if (first == other) continue;
    if (first != nullptr && other != nullptr && !differ(*first, *other)) continue;
    throw NotRead{fmt::format("rules that tell {} from {}", io::show_name(module),
                              io::show_name(modules.front()))};
  }
  if (first == nullptr) return std::nullopt;
  if (!first->weights) throw NotRead{first->reason};
  return *first->weights;
}

bool differ(const ModuleScheme& one, const ModuleScheme& other) {
  return !one.weights || !other.weights || !same(*one.weights, *other.weights);
}

QuantizedWeights of_modules(ModuleSchemes schemes) {
  if (schemes.rules.size() > kMaxRules) {
    throw NotRead{fmt::format("{} rules for modules; at most {} are followed", schemes.rules.size(),
                              kMaxRules)};
  }
  const bool is_one = all_same(schemes);
  if (!is_one) check_experts(schemes);
  QuantizedWeights weights = *(is_one ? schemes.schemes.front() : usual_scheme(schemes)).weights;
  weights.modules = std::make_shared<const ModuleSchemes>(std::move(schemes));
  if (!is_one) weights.by_module = weights.modules;
  return weights;
}

}  // namespace conclave::inline v0::checkpoint

// The request says what the user asks of a conversion.
#pragma once

#include "conclave/format.h"
#include "conclave/quantise.h"

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace conclave::tool {

// Linear layers whose name matches keep their tensors, or become values of a plain type.
struct KeepRule {
  std::string pattern;  // "*" stands for any text, "?" for one character
  std::optional<WeightForm> form;
};

struct ConvertRequest {
  std::filesystem::path source;
  std::filesystem::path destination;
  WeightForm form;
  std::vector<int64_t> layers;  // ascending
  std::vector<KeepRule> keep;   // the first that matches counts
  ScaleRule rule = ScaleRule::kAmax;
  uint64_t shard_bytes = 0;
  bool replace = false;  // a destination, or an unfinished conversion, that is there
};

// Throws Error(kUnknownName) for a form that weight_forms() does not list or that no method has.
WeightForm parse_quantised_form(const std::string& name);
// The names that it takes.
std::vector<std::string> quantised_form_names();
// Parses "PATTERN=FORMAT". Throws Error(kInvalidArgument).
KeepRule parse_keep_rule(const std::string& text);

bool matches(std::string_view pattern, std::string_view name);

}  // namespace conclave::tool

// adapter_config.json: what scales and ranks of PEFT's adapters are, and which adapters are more
// than two factors.
#pragma once

#include "checkpoint/lora/name_pattern.h"
#include "io/json.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave::inline v0 {

class LoraConfig {
 public:
  // Throws Error(kConfigValue, kConfigMissingKey, kJsonType, kUnsupported) naming the key.
  explicit LoraConfig(const io::JsonValue& root);

  // A module or parameter has what the first pattern that matches its full name says, or r and
  // lora_alpha.
  double rank_of(const std::string& name) const { return value_of(ranks_, rank_, name); }
  // The factor of a product of rank `rank`.
  double scale_of(const std::string& name, int64_t rank) const;
  // PEFT before 0.19 took the rows of stacked parameters for their columns, but where a model calls
  // them transposed.
  bool may_turn_stacks() const { return may_turn_stacks_; }

 private:
  struct Pattern {
    NamePattern name;
    double value = 0;
  };
  using Patterns = std::vector<Pattern>;

  static Patterns patterns_of(const io::JsonValue& root, std::string_view key);
  static double value_of(const Patterns& patterns, double other, const std::string& name);

  double rank_ = 0;
  double alpha_ = 0;
  bool by_root_ = false;  // rank-stabilised: alpha / sqrt(r)
  bool may_turn_stacks_ = false;
  Patterns ranks_;
  Patterns alphas_;
};

}  // namespace conclave::inline v0

// Splits tensor names into parts: "model." "layers" 3 "mlp.experts.7.up_proj.weight".
#pragma once

#include "checkpoint/architecture.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0::checkpoint {

struct LayerName {
  std::string_view trunk;  // "model.", or empty
  int64_t layer = 0;       // INT64_MAX if the number does not fit
  bool canonical = true;   // false for "007": such a name matches no pattern
  std::string_view rest;   // after "layers.N."
};

// Splits at the first component `layers` that a number follows; nothing for names without one.
std::optional<LayerName> split_layer_name(std::string_view name, std::string_view layers);

// The expert number for a pattern with {expert}, 0 for one without; nothing if `rest` does not
// match.
std::optional<int64_t> match_pattern(std::string_view pattern, std::string_view rest);

// The pattern with its placeholder filled in.
std::string render_pattern(std::string_view pattern, int64_t expert);

inline constexpr std::string_view kExpertPlaceholder = "{expert}";
inline bool has_expert_placeholder(std::string_view pattern) {
  return pattern.find(kExpertPlaceholder) != std::string_view::npos;
}
// Whether the tensor holds all experts.
inline bool is_stack(const NamePattern& pattern) {
  return is_expert_part(pattern.part) && !has_expert_placeholder(pattern.text);
}

// The candidate closest to `text` in edits, or nothing if all differ by more than half its length.
std::optional<std::string> nearest_name(std::string_view text,
                                        std::span<const std::string> candidates);

}  // namespace conclave::inline v0::checkpoint

// The request says what the user asks of a conversion.
#pragma once

#include "convert/forms/catalog.h"

#include "conclave/quantise.h"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace conclave::tool {

// Linear layers whose name matches keep their tensors, or get a form of their own.
struct KeepRule {
  std::string pattern;  // "*" stands for any text, "?" for one character
  FormPointer form;     // null: they keep their tensors
};

struct ConvertRequest {
  std::filesystem::path source;
  std::filesystem::path destination;
  FormPointer form;
  Container container = Container::kSafetensors;  // the result's
  std::vector<int64_t> layers;                    // ascending
  std::vector<KeepRule> keep;                     // the first that matches counts
  ScaleRule rule = ScaleRule::kAmax;
  uint64_t shard_bytes = 0;
  bool replace = false;  // a destination, or an unfinished conversion, that is there
};

// The container of the model at a path.
Container container_of(const std::filesystem::path& path);
// The container of a result, which its forms go by: the one that is asked for, if any; GGUF if the
// result ends in ".gguf"; the only one that has the form; else that of the source.
Container container_of_result(const std::filesystem::path& source,
                              const std::filesystem::path& destination, const std::string& form,
                              std::optional<Container> asked);
// Parses "PATTERN=FORMAT" for models of a container. Throws Error(kInvalidArgument, kUnknownName).
KeepRule parse_keep_rule(const std::string& text, Container container, ScaleRule rule);

bool matches(std::string_view pattern, std::string_view name);

}  // namespace conclave::tool

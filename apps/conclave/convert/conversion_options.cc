#include "convert/conversion_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

namespace conclave::tool {
namespace {

constexpr std::string_view kDirectoryName = "directory";
constexpr std::string_view kGgufName = "gguf";

using Words = std::pair<std::string_view, std::string_view>;
constexpr std::array kHintWords = {
    Words{"ExistingModel::kReplace", "--force"},
    Words{"ModelContainer::kSafetensors", "--container directory"},
    Words{"ModelContainer::kGguf", "--container gguf"},
};
constexpr std::array kFieldWords = {
    Words{"keep", "--keep"},
    Words{"shard_bytes", "--shard-size"},
};

std::string with_words(std::string text) {
  for (const auto& [from, to] : kHintWords) {
    const size_t at = text.find(from);
    if (at != std::string::npos) text.replace(at, from.size(), to);
  }
  return text;
}

}  // namespace

std::vector<std::string> container_names() {
  return {std::string(kDirectoryName), std::string(kGgufName)};
}

std::optional<ModelContainer> parse_container(std::string_view name) {
  if (name == kDirectoryName) return ModelContainer::kSafetensors;
  if (name == kGgufName) return ModelContainer::kGguf;
  return std::nullopt;
}

KeepRule parse_keep_rule(const std::string& text) {
  const size_t equals = text.rfind('=');
  if (equals == std::string::npos || equals == 0 || equals + 1 == text.size()) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "no rule for layers to keep",
                                              .tensor = "--keep",
                                              .expected = "PATTERN=FORMAT, or PATTERN=source",
                                              .found = fmt::format("'{}'", text)});
  }
  return {.pattern = text.substr(0, equals), .format = text.substr(equals + 1)};
}

std::vector<std::string> conversion_format_names() {
  std::vector<std::string> names;
  for (const ConversionFormat& format : conversion_formats()) {
    if (std::ranges::find(names, format.name) == names.end()) names.push_back(format.name);
  }
  return names;
}

Error in_words_of_options(const Error& error, std::string_view format_option) {
  ErrorDetail detail = error.detail();
  detail.hint = with_words(std::move(detail.hint));
  if (detail.tensor == "format") detail.tensor = format_option;
  for (const auto& [field, option] : kFieldWords) {
    if (detail.tensor == field) detail.tensor = option;
  }
  return {error.code(), std::move(detail)};
}

}  // namespace conclave::tool

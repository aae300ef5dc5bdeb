#include "convert/request.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <string_view>
#include <system_error>

namespace conclave::tool {
namespace {

constexpr std::string_view kAsItIs = "source";

}  // namespace

Container container_of(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored) ? Container::kGguf
                                                         : Container::kSafetensors;
}

Container container_of_result(const std::filesystem::path& source,
                              const std::filesystem::path& destination, const std::string& form,
                              std::optional<Container> asked) {
  if (asked) return *asked;
  const std::filesystem::path named =
      destination.has_filename() ? destination : destination.parent_path();
  if (named.extension() == ".gguf") return Container::kGguf;
  return only_container_of(form).value_or(container_of(source));
}

KeepRule parse_keep_rule(const std::string& text, Container container, ScaleRule rule) {
  const size_t equals = text.rfind('=');
  const std::string name = equals == std::string::npos ? "" : text.substr(equals + 1);
  if (name.empty() || equals == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "no rule for layers to keep",
                 .tensor = "--keep",
                 .expected = fmt::format("PATTERN=FORMAT, or PATTERN={}", kAsItIs),
                 .found = fmt::format("'{}'", text)});
  }
  const std::string pattern = text.substr(0, equals);
  if (name == kAsItIs) return {.pattern = pattern, .form = nullptr};
  return {.pattern = pattern, .form = parse_kept_form(name, container, rule)};
}

// Greedy with one place to come back to: the work is linear in the product of the lengths.
bool matches(std::string_view pattern, std::string_view name) {
  size_t at = 0;
  size_t star = std::string_view::npos;
  size_t resume = 0;
  size_t i = 0;
  while (i < name.size()) {
    if (at < pattern.size() && pattern[at] == '*') {
      star = at++;
      resume = i;
    } else if (at < pattern.size() && (pattern[at] == '?' || pattern[at] == name[i])) {
      ++at;
      ++i;
    } else if (star != std::string_view::npos) {
      at = star + 1;
      i = ++resume;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', at) == std::string_view::npos;
}

}  // namespace conclave::tool

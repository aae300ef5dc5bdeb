#include "cpu/text_file.h"

#include <charconv>
#include <fstream>
#include <iterator>

namespace conclave::inline v0::cpu {

std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) return {};
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const size_t last = text.find_last_not_of(" \t\r\n");
  text.resize(last == std::string::npos ? 0 : last + 1);
  return text;
}

std::optional<int64_t> parse_integer(std::string_view text, std::string_view* rest) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return std::nullopt;
  text.remove_prefix(first);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  if (rest != nullptr) *rest = text;
  return value;
}

std::optional<int64_t> find_value(std::string_view text, std::string_view key) {
  while (!text.empty()) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (!line.starts_with(key)) continue;
    line.remove_prefix(key.size());
    if (line.starts_with(':')) line.remove_prefix(1);
    if (line.starts_with(' ') || line.starts_with('\t')) return parse_integer(line);
  }
  return std::nullopt;
}

}  // namespace conclave::inline v0::cpu

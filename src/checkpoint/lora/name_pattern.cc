#include "checkpoint/lora/name_pattern.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>

namespace conclave::inline v0 {
namespace {

// Each letter of a name is seen once, by all states at the same time. Trying one way after another
// takes exponential time for "(a*)*b".
#ifdef __GLIBCXX__
constexpr auto kFlags = std::regex::ECMAScript | std::regex_constants::__polynomial;
#else
constexpr auto kFlags = std::regex::ECMAScript;
#endif
constexpr int64_t kMostRepeats = 16;

bool is_letter(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-';
}

// The name that a pattern is, a dot standing for any letter and a zero for a dot; nothing for a
// regular expression.
std::optional<std::string> plain_name(std::string_view pattern) {
  std::string name;
  for (size_t at = 0; at < pattern.size(); ++at) {
    const bool escapes = pattern.substr(at).starts_with("\\.");
    if (!escapes && pattern[at] != '.' && !is_letter(pattern[at])) return std::nullopt;
    name += escapes ? '\0' : pattern[at];
    at += escapes ? 1 : 0;
  }
  return name;
}

bool same_letters(std::string_view name, std::string_view plain) {
  return std::ranges::equal(name, plain, [](char letter, char expected) {
    return expected == '.' || letter == (expected == '\0' ? '.' : expected);
  });
}

// The product of all counts in braces, of each the larger one.
int64_t count_repeats(std::string_view pattern) {
  int64_t repeats = 1;
  for (size_t at = 0; at < pattern.size(); ++at) {
    if (pattern[at] == '\\') ++at;
    if (at >= pattern.size() || pattern[at] != '{') continue;
    int64_t most = 1;
    for (++at; at < pattern.size() && pattern[at] != '}'; ++at) {
      int64_t count = 0;
      const char* const begin = pattern.data() + at;
      const auto [end, problem] = std::from_chars(begin, pattern.data() + pattern.size(), count);
      if (end == begin) continue;
      most = std::max(most, problem == std::errc() ? count : kMostRepeats + 1);
      at += static_cast<size_t>(end - begin) - 1;
    }
    repeats = std::min(repeats, kMostRepeats + 1) * std::min(most, kMostRepeats + 1);
  }
  return repeats;
}

void refuse_slow(std::string_view pattern) {
  const bool looks_ahead =
      pattern.find("(?=") != pattern.npos || pattern.find("(?!") != pattern.npos;
  if (looks_ahead || count_repeats(pattern) > kMostRepeats) {
    throw std::regex_error(std::regex_constants::error_complexity);
  }
}

}  // namespace

NamePattern::NamePattern(std::string_view pattern) : letters_(pattern.size()) {
  std::string_view inner = pattern;
  is_whole_ = inner.starts_with('^');
  if (is_whole_) inner.remove_prefix(1);
  if (inner.ends_with('$') && !inner.ends_with("\\$")) inner.remove_suffix(1);
  if (const auto plain = plain_name(inner)) {
    plain_ = *plain;
    return;
  }
  refuse_slow(pattern);
  regex_.emplace("(.*\\.)?(" + std::string(pattern) + ")", kFlags);
}

bool NamePattern::matches(const std::string& name) const {
  if (regex_) return std::regex_match(name, *regex_);
  if (name.size() == plain_.size()) return same_letters(name, plain_);
  if (is_whole_ || name.size() < plain_.size()) return false;
  const size_t begin = name.size() - plain_.size();
  return name[begin - 1] == '.' && same_letters(std::string_view(name).substr(begin), plain_);
}

}  // namespace conclave::inline v0

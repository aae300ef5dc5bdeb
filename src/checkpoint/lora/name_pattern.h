// Patterns of PEFT's rank_pattern and alpha_pattern. They come from files, so that their time is
// bounded: it grows with the letters of a name, however a pattern repeats itself.
#pragma once

#include <cstddef>
#include <optional>
#include <regex>
#include <string>
#include <string_view>

namespace conclave::inline v0 {

// Matches a full name, or what follows one of its dots. Most patterns are plain names, in which a
// dot is any letter: thousands of them are compared with thousands of names.
class NamePattern {
 public:
  // Throws std::regex_error for what is no regular expression. Those that could take time without
  // bound are refused likewise: back references, looking ahead, and repeats of many repeats.
  explicit NamePattern(std::string_view pattern);

  bool matches(const std::string& name) const;
  // Letters of a regular expression; 0 for a plain name.
  size_t regex_letters() const noexcept { return regex_ ? letters_ : 0; }

 private:
  size_t letters_ = 0;
  std::string plain_;
  bool is_whole_ = false;  // the plain name is a full one
  std::optional<std::regex> regex_;
};

}  // namespace conclave::inline v0

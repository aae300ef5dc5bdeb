// Names of cases: GoogleTest allows letters, digits and underscores.
#pragma once

#include <algorithm>
#include <cctype>
#include <string>

namespace conclave::testing {

inline std::string case_name(std::string text) {
  std::ranges::replace_if(
      text, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return text;
}

}  // namespace conclave::testing

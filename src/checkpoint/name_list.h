// Lists in messages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>

namespace conclave::inline v0::checkpoint {

inline constexpr size_t kMaxListedNames = 10;

// "a, b, c and 7 more": the first ten at most.
inline std::string first_few(std::span<const std::string> names, size_t limit = kMaxListedNames) {
  std::string text;
  const size_t shown = std::min(names.size(), limit);
  for (size_t i = 0; i < shown; ++i) text += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > shown) text += " and " + std::to_string(names.size() - shown) + " more";
  return text;
}

}  // namespace conclave::inline v0::checkpoint

// Renders lists for messages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace conclave::inline v0::checkpoint {

inline constexpr size_t kMaxListedNames = 10;

// "a, b, c and 7 more": ten names at most, unless `limit` says otherwise.
inline std::string first_few(std::span<const std::string> names, size_t limit = kMaxListedNames) {
  std::string text;
  const size_t shown = std::min(names.size(), limit);
  for (size_t i = 0; i < shown; ++i) text += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > shown) text += " and " + std::to_string(names.size() - shown) + " more";
  return text;
}

// "0, 2 to 5" for 0, 2, 3, 4, 5. The numbers are ascending.
inline std::string render_ranges(std::span<const int64_t> numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(numbers[i]);
    if (last > i) text += " to " + std::to_string(numbers[last]);
    i = last + 1;
  }
  return text;
}

// "[8, 2]"
inline std::string render_shape(std::span<const int64_t> shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

}  // namespace conclave::inline v0::checkpoint

#include "checkpoint/tensor_name.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <numeric>
#include <vector>

namespace conclave::inline v0::checkpoint {
namespace {

// Names come from files: the quadratic edit distance only considers this much of them.
constexpr size_t kMaxComparedLength = 256;

struct Number {
  int64_t value = 0;
  size_t length = 0;  // 0: no digit
  bool canonical = true;
};

Number leading_number(std::string_view text) {
  Number number;
  while (number.length < text.size() && text[number.length] >= '0' && text[number.length] <= '9') {
    ++number.length;
  }
  number.canonical = number.length == 1 || (number.length > 1 && text[0] != '0');
  const auto result = std::from_chars(text.data(), text.data() + number.length, number.value);
  if (result.ec == std::errc::result_out_of_range) {
    number.value = std::numeric_limits<int64_t>::max();
  }
  return number;
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

}  // namespace

std::optional<LayerName> split_layer_name(std::string_view name, std::string_view layers) {
  size_t at = 0;
  while ((at = name.find(layers, at)) != std::string_view::npos) {
    const size_t dot = at + layers.size();
    const bool whole_component =
        (at == 0 || name[at - 1] == '.') && dot < name.size() && name[dot] == '.';
    if (whole_component) {
      const Number number = leading_number(name.substr(dot + 1));
      const size_t end = dot + 1 + number.length;
      if (number.length > 0 && end < name.size() && name[end] == '.') {
        return LayerName{.trunk = name.substr(0, at),
                         .layer = number.value,
                         .canonical = number.canonical,
                         .rest = name.substr(end + 1)};
      }
    }
    at = dot;
  }
  return std::nullopt;
}

std::optional<int64_t> match_pattern(std::string_view pattern, std::string_view rest) {
  const size_t at = pattern.find(kExpertPlaceholder);
  if (at == std::string_view::npos) {
    return rest == pattern ? std::optional<int64_t>(0) : std::nullopt;
  }
  if (!rest.starts_with(pattern.substr(0, at))) return std::nullopt;
  const Number number = leading_number(rest.substr(at));
  if (number.length == 0 || !number.canonical) return std::nullopt;
  if (rest.substr(at + number.length) != pattern.substr(at + kExpertPlaceholder.size())) {
    return std::nullopt;
  }
  return number.value;
}

std::string render_pattern(std::string_view pattern, int64_t expert) {
  std::string text(pattern);
  const size_t at = text.find(kExpertPlaceholder);
  if (at != std::string::npos) {
    text.replace(at, kExpertPlaceholder.size(), std::to_string(expert));
  }
  return text;
}

std::optional<std::string> nearest_name(std::string_view text,
                                        std::span<const std::string> candidates) {
  text = text.substr(0, kMaxComparedLength);
  const std::string* best = nullptr;
  size_t best_distance = text.size() / 2 + 1;
  for (const std::string& candidate : candidates) {
    const size_t distance =
        edit_distance(text, std::string_view(candidate).substr(0, kMaxComparedLength));
    if (distance >= best_distance) continue;
    best_distance = distance;
    best = &candidate;
  }
  return best ? std::optional<std::string>(*best) : std::nullopt;
}

}  // namespace conclave::inline v0::checkpoint

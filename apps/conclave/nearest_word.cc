#include "nearest_word.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace conclave::tool {
namespace {

// Computes the optimal string alignment distance. The table keeps the rows of the last two letters
// of `from`, since a swap of neighbours looks two letters back.
size_t distance(std::string_view from, std::string_view to) {
  std::vector<size_t> two_back(to.size() + 1);
  std::vector<size_t> last(to.size() + 1);
  std::vector<size_t> row(to.size() + 1);
  for (size_t j = 0; j <= to.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= from.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= to.size(); ++j) {
      const size_t replaced = last[j - 1] + (from[i - 1] == to[j - 1] ? 0 : 1);
      row[j] = std::min({replaced, last[j] + 1, row[j - 1] + 1});
      const bool swapped = i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1];
      if (swapped) row[j] = std::min(row[j], two_back[j - 2] + 1);
    }
    std::swap(two_back, last);
    std::swap(last, row);
  }
  return last[to.size()];
}

}  // namespace

std::string nearest_word(std::string_view word, std::span<const std::string> candidates) {
  constexpr size_t kLongestWord = 64;  // longer texts were not meant to be one of a few words
  std::string best;
  if (word.size() > kLongestWord) return best;
  size_t fewest = (word.size() + 1) / 2;
  for (const std::string& candidate : candidates) {
    const size_t edits = distance(word, candidate);
    if (edits >= fewest) continue;
    fewest = edits;
    best = candidate;
  }
  return best;
}

}  // namespace conclave::tool

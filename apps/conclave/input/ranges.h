// Parses lists and ranges of numbers on the command line: "1,2,4", "1-9+2", "1-64*2", "0-3,7"; and
// byte sizes.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

namespace conclave::tool {

// One item of a list: the values first, next, ... up to last.
struct RangeItem {
  int64_t first = 0;
  int64_t last = 0;
  int64_t step = 1;
  enum class Rule : uint8_t { kAdd, kMultiply } rule = Rule::kAdd;

  bool single() const { return first == last; }
};

// The values that an option accepts; `option` names it in errors.
struct ListLimits {
  std::string_view option;
  int64_t lowest = 0;
  int64_t highest = std::numeric_limits<int64_t>::max();
};

// Both throw Error(kInvalidArgument) naming the option, the item and the limit.
std::vector<RangeItem> parse_range_items(std::string_view text, const ListLimits& limits);
// Returns all values in the order written, including repeats; at most 10000.
std::vector<int64_t> parse_number_list(std::string_view text, const ListLimits& limits);
std::vector<int64_t> expand(const RangeItem& item);

// Parses "512", "64kB", "5GB", "1.5GB" or "2GiB".
uint64_t parse_byte_size(std::string_view text, std::string_view option);

}  // namespace conclave::tool

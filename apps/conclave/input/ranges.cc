#include "input/ranges.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

namespace conclave::tool {
namespace {

constexpr int64_t kLargestList = 10000;

[[noreturn]] void reject(const ListLimits& limits, std::string what, std::string_view found) {
  throw Error(ErrorCode::kInvalidArgument,
              {.what = std::move(what),
               .tensor = std::string(limits.option),
               .expected = "numbers and ranges, such as 1,2,4 or 1-9+2 or 1-64*2",
               .found = fmt::format("'{}'", found)});
}

std::optional<int64_t> parse_integer(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  // from_chars takes a minus sign, which is our range sign.
  if (error != std::errc() || end != text.data() + text.size() || text.front() == '-') return {};
  return value;
}

void check_limits(int64_t value, const ListLimits& limits) {
  if (value >= limits.lowest && value <= limits.highest) return;
  const bool open = limits.highest == std::numeric_limits<int64_t>::max();
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "a number is out of range",
               .tensor = std::string(limits.option),
               .found = fmt::format("{}", value),
               .limit = open ? fmt::format("at least {}", limits.lowest)
                             : fmt::format("{} to {}", limits.lowest, limits.highest)});
}

RangeItem parse_item(std::string_view text, const ListLimits& limits) {
  const size_t dash = text.find('-');
  RangeItem item;
  if (dash == std::string_view::npos) {
    const std::optional<int64_t> value = parse_integer(text);
    if (!value) reject(limits, "not a number or a range", text);
    item.first = item.last = *value;
  } else {
    const size_t sign = text.find_first_of("+*", dash + 1);
    const std::optional<int64_t> first = parse_integer(text.substr(0, dash));
    const std::optional<int64_t> last = parse_integer(text.substr(dash + 1, sign - dash - 1));
    if (!first || !last) reject(limits, "not a number or a range", text);
    if (*first > *last) reject(limits, "the range runs backwards", text);
    item.first = *first;
    item.last = *last;
    if (sign != std::string_view::npos) {
      const std::optional<int64_t> step = parse_integer(text.substr(sign + 1));
      item.rule = text[sign] == '*' ? RangeItem::Rule::kMultiply : RangeItem::Rule::kAdd;
      const bool multiply = item.rule == RangeItem::Rule::kMultiply;
      if (!step || *step < (multiply ? 2 : 1))
        reject(limits, "the range's step is too small", text);
      if (multiply && item.first == 0) reject(limits, "0 cannot be multiplied onwards", text);
      item.step = *step;
    }
  }
  check_limits(item.first, limits);
  check_limits(item.last, limits);
  return item;
}

}  // namespace

std::vector<RangeItem> parse_range_items(std::string_view text, const ListLimits& limits) {
  std::vector<RangeItem> items;
  size_t begin = 0;
  while (true) {
    const size_t comma = text.find(',', begin);
    const std::string_view part = text.substr(begin, comma - begin);
    if (part.empty()) reject(limits, "an item of the list is empty", text);
    items.push_back(parse_item(part, limits));
    if (comma == std::string_view::npos) return items;
    begin = comma + 1;
  }
}

std::vector<int64_t> expand(const RangeItem& item) {
  std::vector<int64_t> values;
  int64_t value = item.first;
  while (static_cast<int64_t>(values.size()) <= kLargestList) {
    values.push_back(value);
    int64_t next = 0;
    const bool overflow = item.rule == RangeItem::Rule::kMultiply
                              ? __builtin_mul_overflow(value, item.step, &next)
                              : __builtin_add_overflow(value, item.step, &next);
    if (overflow || next > item.last) break;
    value = next;
  }
  return values;
}

std::vector<int64_t> parse_number_list(std::string_view text, const ListLimits& limits) {
  std::vector<int64_t> values;
  for (const RangeItem& item : parse_range_items(text, limits)) {
    const std::vector<int64_t> more = expand(item);
    values.insert(values.end(), more.begin(), more.end());
    if (static_cast<int64_t>(values.size()) > kLargestList) {
      throw Error(ErrorCode::kInvalidArgument, {.what = "the list is too long",
                                                .tensor = std::string(limits.option),
                                                .found = fmt::format("'{}'", text),
                                                .limit = fmt::format("{} values", kLargestList)});
    }
  }
  return values;
}

uint64_t parse_byte_size(std::string_view text, std::string_view option) {
  static constexpr std::pair<std::string_view, double> kUnits[] = {
      {"", 1},      {"B", 1},        {"kB", 1e3},     {"KB", 1e3},     {"MB", 1e6},    {"GB", 1e9},
      {"TB", 1e12}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  const size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + digits, number);
  for (const auto& [unit, factor] : kUnits) {
    if (error != std::errc() || end != text.data() + digits || unit != text.substr(digits))
      continue;
    const double bytes = number * factor;
    if (bytes >= 1 && bytes < 0x1p62) return static_cast<uint64_t>(bytes);
  }
  throw Error(ErrorCode::kInvalidArgument, {.what = "not a size in bytes",
                                            .tensor = std::string(option),
                                            .expected = "a positive size, such as 5GB or 512MiB",
                                            .found = fmt::format("'{}'", text)});
}

}  // namespace conclave::tool

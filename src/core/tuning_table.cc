#include "conclave/error.h"
#include "conclave/tuning.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr std::string_view kHeading = "conclave-tuning ";
constexpr int kVersion = 1;
// No real table has more: a text that is not a table is refused early.
constexpr size_t kMostEntries = size_t{1} << 20;

std::string_view trim(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r";
  const size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

// Returns the text before the next separator; `rest` continues behind it.
std::string_view take_until(std::string_view& rest, char separator) {
  const size_t end = std::min(rest.find(separator), rest.size());
  const std::string_view taken = rest.substr(0, end);
  rest.remove_prefix(std::min(end + 1, rest.size()));
  return trim(taken);
}

template <class Number>
std::optional<Number> parse_number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Parses "E 128 H 2048": each label followed by a positive number, in this order and nothing else.
template <size_t kCount>
bool parse_labelled(std::string_view text, const std::array<std::string_view, kCount>& labels,
                    const std::array<int64_t*, kCount>& values) {
  for (size_t i = 0; i < kCount; ++i) {
    text = trim(text);
    if (take_until(text, ' ') != labels[i]) return false;
    text = trim(text);
    const std::optional<int64_t> value = parse_number<int64_t>(take_until(text, ' '));
    if (!value || *value < 1) return false;
    *values[i] = *value;
  }
  return trim(text).empty();
}

std::optional<TuningEntry> parse_entry(std::string_view line) {
  TuningEntry entry;
  TuningKey& key = entry.key;
  key.device = take_until(line, '|');
  key.format = take_until(line, '|');
  constexpr std::array<std::string_view, 4> kSizes = {"E", "H", "I", "k"};
  const bool has_sizes =
      parse_labelled<4>(take_until(line, '|'), kSizes,
                        {&key.num_experts, &key.hidden_size, &key.intermediate_size, &key.top_k});
  const bool has_tokens = parse_labelled<1>(take_until(line, '|'), {"T"}, {&entry.tokens});
  entry.kernel = take_until(line, '|');
  entry.tile = take_until(line, '|');
  const std::optional<double> time = parse_number<double>(trim(line));
  const bool whole = has_sizes && has_tokens && time && !key.device.empty() &&
                     !key.format.empty() && !entry.kernel.empty();
  if (!whole) return std::nullopt;
  entry.microseconds = *time;
  return entry;
}

[[noreturn]] void refuse_line(std::string_view name, size_t number, std::string_view line) {
  constexpr size_t kShown = 120;
  throw Error(ErrorCode::kTuningSyntax,
              {.what = "line " + std::to_string(number) + " of a tuning table is no entry",
               .file = std::string(name),
               .expected = "DEVICE | FORMAT | E n H n I n k n | T n | KERNEL | TILE | MICROSECONDS",
               .found = std::string(line.substr(0, kShown))});
}

void check_heading(std::string_view name, std::string_view line) {
  if (!line.starts_with(kHeading)) {
    throw Error(ErrorCode::kTuningSyntax, {.what = "this is no tuning table",
                                           .file = std::string(name),
                                           .expected = fmt::format("{}{}", kHeading, kVersion),
                                           .found = std::string(line.substr(0, 40))});
  }
  const std::optional<int> version = parse_number<int>(line.substr(kHeading.size()));
  if (version && *version == kVersion) return;
  throw Error(ErrorCode::kTuningVersion, {.what = "a tuning table of another version",
                                          .file = std::string(name),
                                          .expected = std::to_string(kVersion),
                                          .found = std::string(line.substr(kHeading.size(), 40))});
}

auto order(const TuningKey& key, int64_t tokens) {
  return std::tuple(std::string_view(key.device), std::string_view(key.format), key.num_experts,
                    key.hidden_size, key.intermediate_size, key.top_k, tokens);
}

bool before(const TuningEntry& entry, const std::pair<const TuningKey&, int64_t>& place) {
  return order(entry.key, entry.tokens) < order(place.first, place.second);
}

}  // namespace

TuningTable TuningTable::parse(std::string_view text, std::string_view name) {
  TuningTable table;
  bool has_heading = false;
  for (size_t number = 1; !text.empty(); ++number) {
    const std::string_view line = take_until(text, '\n');
    if (line.empty() || line.front() == '#') continue;
    if (!has_heading) {
      check_heading(name, line);
      has_heading = true;
      continue;
    }
    std::optional<TuningEntry> entry = parse_entry(line);
    if (!entry || table.entries_.size() >= kMostEntries) refuse_line(name, number, line);
    table.set(*std::move(entry));
  }
  if (!has_heading) check_heading(name, "");
  return table;
}

std::string TuningTable::to_text() const {
  std::string text = fmt::format("{}{}\n", kHeading, kVersion);
  for (const TuningEntry& entry : entries_) {
    const TuningKey& key = entry.key;
    text += fmt::format("{} | {} | E {} H {} I {} k {} | T {} | {} | {} | {:.3f}\n", key.device,
                        key.format, key.num_experts, key.hidden_size, key.intermediate_size,
                        key.top_k, entry.tokens, entry.kernel, entry.tile, entry.microseconds);
  }
  return text;
}

void TuningTable::set(TuningEntry entry) {
  const std::pair<const TuningKey&, int64_t> place(entry.key, entry.tokens);
  const auto found = std::lower_bound(entries_.begin(), entries_.end(), place, before);
  const bool replaces =
      found != entries_.end() && found->key == entry.key && found->tokens == entry.tokens;
  if (replaces) {
    *found = std::move(entry);
  } else {
    entries_.insert(found, std::move(entry));
  }
}

const TuningEntry* TuningTable::find(const TuningKey& key, int64_t tokens) const noexcept {
  const std::pair<const TuningKey&, int64_t> place(key, tokens);
  const auto found = std::lower_bound(entries_.begin(), entries_.end(), place, before);
  return found != entries_.end() && found->key == key ? &*found : nullptr;
}

}  // namespace conclave::inline v0

#include "checkpoint/config_reader.h"

#include "io/text.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace conclave::inline v0::checkpoint {
namespace {

// No model has a scale, bound or epsilon beyond this; the product of two still fits a double.
constexpr double kMaxNumber = 1e30;

// The member at a dotted path; nothing if a part of the path is not an object.
std::optional<io::JsonValue> find_path(io::JsonValue object, std::string_view path) {
  for (;;) {
    if (!object.is_object()) return std::nullopt;
    const size_t dot = path.find('.');
    const auto member = object.find(path.substr(0, dot));
    if (!member || dot == std::string_view::npos) return member;
    object = *member;
    path.remove_prefix(dot + 1);
  }
}

[[noreturn]] void reject_missing(const io::JsonValue& config, const KeyNames& key) {
  const std::string where = config.path().empty() ? "" : config.path() + ".";
  std::string spellings;
  for (std::string_view name : key.names()) {
    spellings += (spellings.empty() ? "" : " or ") + where + std::string(name);
  }
  throw Error(ErrorCode::kConfigMissingKey, {.what = "the key " + spellings + " is missing",
                                             .file = config.file(),
                                             .expected = "an integer"});
}

}  // namespace

std::string render(const io::JsonValue& value) {
  switch (value.type()) {
    case io::JsonType::kBool:
      return value.as_bool() ? "true" : "false";
    case io::JsonType::kInteger:
      return std::to_string(value.as_int64());
    case io::JsonType::kFloat:
      return fmt::format("{}", value.as_double());
    case io::JsonType::kString:
      return io::show_text(value.as_string());
    default:
      return std::string(io::to_string(value.type()));
  }
}

void reject_value(const io::JsonValue& value, std::string fault, std::string limit) {
  throw Error(ErrorCode::kConfigValue, {.what = value.path() + " " + std::move(fault),
                                        .file = value.file(),
                                        .found = render(value),
                                        .limit = std::move(limit)});
}

int64_t checked_size(const io::JsonValue& value, const SizeRange& range) {
  const std::string limit =
      fmt::format("an integer from {} to {}{}", range.low, range.high, range.why);
  if (!value.is_integer()) reject_value(value, "is not an integer", limit);
  const int64_t size = value.as_int64();
  if (size < range.low || size > range.high) reject_value(value, "is out of range", limit);
  return size;
}

std::optional<io::JsonValue> ConfigReader::find(const KeyNames& key) const {
  for (std::string_view name : key.names()) {
    const auto value = find_path(config_, name);
    if (value && !value->is_null()) return value;
  }
  return std::nullopt;
}

bool ConfigReader::has(const KeyNames& key) const {
  for (std::string_view name : key.names()) {
    if (find_path(config_, name)) return true;
  }
  return false;
}

const std::vector<io::JsonValue>& ConfigReader::list(const io::JsonValue& value,
                                                     int64_t length) const {
  std::vector<io::JsonValue>& items = cache_[value.path()];
  if (items.empty()) {
    for (const io::JsonValue& item : value.items()) items.push_back(item);
  }
  if (static_cast<int64_t>(items.size()) < length) {
    throw Error(ErrorCode::kConfigValue,
                {.what = value.path() + " is too short",
                 .file = value.file(),
                 .found = fmt::format("{} values", items.size()),
                 .limit = fmt::format("at least {}, one value per layer", length)});
  }
  return items;
}

io::JsonValue ConfigReader::entry(const io::JsonValue& list_value, int64_t layer) const {
  const auto& items = list(list_value, layer < first_extra_ ? layer + 1 : 1);
  return items[std::min(static_cast<size_t>(layer), items.size() - 1)];
}

std::optional<io::JsonValue> ConfigReader::find_at(const KeyNames& key, int64_t layer) const {
  const auto value = find(key);
  if (!value || !value->is_array()) return value;
  const int64_t index = lists_ == SizeKeys::Lists::kPerLayer ? layer
                        : lists_ == SizeKeys::Lists::kVision ? 1
                                                             : 0;
  const io::JsonValue item = entry(*value, index);
  return item.is_null() ? std::nullopt : std::optional(item);
}

int64_t ConfigReader::size(const SizeKey& key, const SizeRange& range, int64_t layer) const {
  if (const auto value = find_at(key.key, layer)) return checked_size(*value, range);
  if (!key.otherwise) reject_missing(config_, key.key);
  return *key.otherwise;
}

double ConfigReader::number(const NumberKey& key, int64_t layer) const {
  const auto value = find_at(key.key, layer);
  if (!value) return key.otherwise;
  const std::string limit = fmt::format("a finite number from 0 to {}", kMaxNumber);
  if (!value->is_number()) reject_value(*value, "is not a number", limit);
  const double number = value->as_double();
  if (!(number >= 0 && number <= kMaxNumber)) reject_value(*value, "is out of range", limit);
  return number;
}

bool ConfigReader::flag(const FlagKey& key) const {
  const auto value = find(key.key);
  return value ? value->as_bool() : key.otherwise;
}

std::string ConfigReader::text(const KeyNames& key, std::string_view otherwise) const {
  const auto value = find(key);
  return std::string(value ? value->as_string() : otherwise);
}

}  // namespace conclave::inline v0::checkpoint

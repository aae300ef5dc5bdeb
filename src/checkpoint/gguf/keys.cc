#include "checkpoint/gguf/keys.h"

#include "io/text.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>
#include <variant>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kArchitectureKey = "general.architecture";
constexpr double kLargestNumber = 1e30;

std::string describe(const io::GgufValue& value) {
  if (std::holds_alternative<std::string>(value)) return "a text";
  if (std::holds_alternative<bool>(value)) return "a bool";
  return std::holds_alternative<io::GgufArray>(value) ? "an array" : "a number";
}

std::optional<double> to_number(const io::GgufValue& value) {
  if (const auto* number = std::get_if<uint64_t>(&value)) return static_cast<double>(*number);
  if (const auto* number = std::get_if<int64_t>(&value)) return static_cast<double>(*number);
  if (const auto* number = std::get_if<double>(&value)) return *number;
  return std::nullopt;
}

}  // namespace

GgufKeys::GgufKeys(const io::GgufHeader& header, std::string file)
    : header_(header), file_(std::move(file)) {
  const io::GgufValue* value = header.find_value(kArchitectureKey);
  if (value == nullptr) {
    reject(ErrorCode::kConfigMissingKey, kArchitectureKey,
           {.what = "the file does not say which architecture its model has"});
  }
  const auto* name = std::get_if<std::string>(value);
  if (name == nullptr) {
    reject(ErrorCode::kConfigValue, kArchitectureKey,
           {.what = "the architecture must be a string", .found = describe(*value)});
  }
  architecture_ = *name;
}

void GgufKeys::reject(ErrorCode code, std::string_view key, ErrorDetail detail) const {
  detail.file = file_;
  detail.tensor = key.starts_with("general.")
                      ? std::string(key)
                      : io::show_name(architecture_ + "." + std::string(key));
  throw Error(code, std::move(detail));
}

const io::GgufValue* GgufKeys::find(std::string_view key) const {
  return header_.find_value(architecture_ + "." + std::string(key));
}

std::optional<double> GgufKeys::entry(std::string_view key, int64_t layer) const {
  const io::GgufValue* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (const auto number = to_number(*value)) return number;
  const auto* array = std::get_if<io::GgufArray>(value);
  if (array == nullptr || !array->of_numbers) {
    reject(ErrorCode::kConfigValue, key,
           {.what = "the key's value is no number", .found = describe(*value)});
  }
  if (layer >= static_cast<int64_t>(array->numbers.size())) {
    reject(ErrorCode::kConfigValue, key,
           {.what = fmt::format("the array has no value for layer {}", layer),
            .found = fmt::format("{} values", array->count)});
  }
  return array->numbers[static_cast<size_t>(layer)];
}

int64_t GgufKeys::size(std::string_view key, std::optional<int64_t> otherwise,
                       const SizeRange& range, int64_t layer) const {
  const std::optional<double> found = entry(key, layer);
  if (!found && otherwise) return *otherwise;
  if (!found) reject(ErrorCode::kConfigMissingKey, key, {.what = "the file lacks a key"});
  if (*found >= static_cast<double>(range.low) && *found <= static_cast<double>(range.high) &&
      *found == std::floor(*found)) {
    return static_cast<int64_t>(*found);
  }
  reject(ErrorCode::kConfigValue, key,
         {.what = "the key's value is out of range",
          .found = fmt::format("{}", *found),
          .limit = fmt::format("{} to {}{}", range.low, range.high, range.why)});
}

double GgufKeys::number(std::string_view key, double otherwise, int64_t layer) const {
  const std::optional<double> found = entry(key, layer);
  if (!found) return otherwise;
  if (*found >= 0 && *found <= kLargestNumber) return *found;
  reject(ErrorCode::kConfigValue, key,
         {.what = "the key's value is out of range",
          .found = fmt::format("{}", *found),
          .limit = fmt::format("0 to {:g}", kLargestNumber)});
}

bool GgufKeys::flag(std::string_view key, bool otherwise) const {
  const io::GgufValue* value = find(key);
  if (value == nullptr) return otherwise;
  if (const auto* flag = std::get_if<bool>(value)) return *flag;
  reject(ErrorCode::kConfigValue, key,
         {.what = "the key's value is no bool", .found = describe(*value)});
}

}  // namespace conclave::inline v0::checkpoint

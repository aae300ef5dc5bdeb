#include "capi/spec_json.h"

#include "capi/words.h"
#include "core/spec_fields.h"
#include "io/json.h"

#include "conclave/error.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

namespace conclave::inline v0::capi {
namespace {

std::vector<std::string_view> split_names(std::string_view list) {
  std::vector<std::string_view> names;
  while (!list.empty()) {
    const size_t end = std::min(list.find(", "), list.size());
    names.push_back(list.substr(0, end));
    list.remove_prefix(std::min(end + 2, list.size()));
  }
  return names;
}

// Overloads read one value; the struct's own are found by the members that it lists.
void read(const io::JsonValue& value, bool& to) { to = value.as_bool(); }
void read(const io::JsonValue& value, int64_t& to) { to = value.as_int64(); }
void read(const io::JsonValue& value, double& to) { to = value.as_double(); }
void read(const io::JsonValue& value, std::string& to) { to = value.as_string(); }

void read(const io::JsonValue& value, int32_t& to) {
  const int64_t number = value.as_int64();
  if (number < std::numeric_limits<int32_t>::min() ||
      number > std::numeric_limits<int32_t>::max()) {
    value.reject(ErrorCode::kInvalidArgument, "a number is out of range", "a number of 32 bits");
  }
  to = static_cast<int32_t>(number);
}

void read(const io::JsonValue& value, float& to) {
  const double number = value.as_double();
  if (std::abs(number) > double{std::numeric_limits<float>::max()}) {
    value.reject(ErrorCode::kInvalidArgument, "a number is out of range", "a number of float32");
  }
  to = static_cast<float>(number);
}

void read(const io::JsonValue& value, uint64_t& to) {
  const int64_t number = value.as_int64();
  if (number < 0) value.reject(ErrorCode::kInvalidArgument, "a number is negative", "at least 0");
  to = static_cast<uint64_t>(number);
}

void read(const io::JsonValue& value, DType& to) {
  const std::optional<DType> dtype = parse_dtype(value.as_string());
  if (!dtype) value.reject(ErrorCode::kDType, "no type has this name", "\"BF16\", \"F32\", ...");
  to = *dtype;
}

template <class Enum>
  requires std::is_enum_v<Enum>
void read(const io::JsonValue& value, Enum& to) {
  const std::string_view text = value.as_string();
  std::string known;
  for (const Word<Enum>& word : kWords<Enum>) {
    if (word.text == text) {
      to = word.value;
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(word.text);
  }
  value.reject(ErrorCode::kUnknownName, "a field has no such value", "one of " + known);
}

template <class Value>
void read(const io::JsonValue& value, std::optional<Value>& to) {
  read(value, to.emplace());
}

template <class Value>
void read(const io::JsonValue& value, std::vector<Value>& to) {
  to.clear();
  for (const io::JsonValue item : value.items()) read(item, to.emplace_back());
}

void read(const io::JsonValue& value, std::map<std::string, double>& to) {
  to.clear();
  for (const auto [key, item] : value.members()) read(item, to[std::string(key)]);
}

template <HasFields Struct>
void read(const io::JsonValue& value, Struct& to) {
  // A name alone stands for an activation without parameters.
  if constexpr (std::is_same_v<Struct, ActivationSpec>) {
    if (value.is_string()) return read(value, to.name);
  }
  const std::vector<std::string_view> names = split_names(field_names(to));
  for (const auto [key, member] : value.members()) {
    if (std::ranges::find(names, key) != names.end()) continue;
    member.reject(ErrorCode::kInvalidArgument, "there is no such field",
                  "one of " + std::string(field_names(to)));
  }
  auto name = names.begin();
  const auto read_one = [&](const auto& field) {
    using Field = std::remove_cvref_t<decltype(field)>;
    const std::optional<io::JsonValue> member = value.find_set(*name++);
    // The list of fields is of a struct that the caller may change.
    if (member) read(*member, const_cast<Field&>(field));
  };
  std::apply([&](const auto&... fields) { (read_one(fields), ...); }, tie_fields(to));
}

template <class Value>
Json json_of_value(const Value& value) {
  if constexpr (std::is_same_v<Value, DType>) {
    return std::string(to_string(value));
  } else if constexpr (std::is_enum_v<Value>) {
    const auto word = std::ranges::find(kWords<Value>, value, &Word<Value>::value);
    return std::string(word->text);
  } else if constexpr (HasFields<Value>) {
    Json object = Json::object();
    const std::vector<std::string_view> names = split_names(field_names(value));
    auto name = names.begin();
    const auto write_one = [&](const auto& field) {
      object[std::string(*name++)] = json_of_value(field);
    };
    std::apply([&](const auto&... fields) { (write_one(fields), ...); }, tie_fields(value));
    return object;
  } else {
    return value;
  }
}

template <>
Json json_of_value(const std::optional<DType>& value) {
  return value ? json_of_value(*value) : Json(nullptr);
}

}  // namespace

MoeSpec spec_of_json(const std::string& text) {
  const io::JsonDocument document =
      io::JsonDocument::parse(text, "spec", {.max_bytes = 64'000'000});
  MoeSpec spec;
  read(document.root(), spec);
  return spec;
}

Json json_of_spec(const MoeSpec& spec) { return json_of_value(spec); }

}  // namespace conclave::inline v0::capi

#include "checkpoint/quantization_keys.h"

#include "io/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {
namespace {

using io::JsonMember;
using io::JsonType;
using io::JsonValue;

std::string shown(const JsonValue& value) {
  if (value.is_bool()) return value.as_bool() ? "true" : "false";
  if (value.is_integer()) return std::to_string(value.as_int64());
  if (value.is_number()) return fmt::format("{}", value.as_double());
  if (value.is_string()) return io::show_text(value.as_string());
  return std::string(to_string(value.type()));
}

[[noreturn]] void reject(const JsonValue& found, const std::string& expected) {
  found.reject(ErrorCode::kConfigValue, "two keys describe the quantised weights, and differ",
               expected, "keep the one whose values the tensors have; MLX writes both alike");
}

// Without members that are null, which count as absent. By their names, so that objects of many
// modules are compared in one pass.
std::vector<JsonMember> members_by_name(const JsonValue& object) {
  std::vector<JsonMember> members;
  for (const JsonMember& member : object.members()) {
    if (!member.value.is_null()) members.push_back(member);
  }
  std::ranges::sort(members, {}, &JsonMember::key);
  return members;
}

bool is_same_scalar(const JsonValue& one, const JsonValue& other) {
  if (one.is_bool() && other.is_bool()) return one.as_bool() == other.as_bool();
  if (one.is_integer() && other.is_integer()) return one.as_int64() == other.as_int64();
  if (one.is_number() && other.is_number()) return one.as_double() == other.as_double();
  if (one.is_string() && other.is_string()) return one.as_string() == other.as_string();
  return one.is_null() && other.is_null();
}

void require_same(const JsonValue& one, const JsonValue& other);

void require_same_members(const JsonValue& one, const JsonValue& other) {
  const std::vector<JsonMember> members = members_by_name(one);
  const std::vector<JsonMember> others = members_by_name(other);
  for (size_t i = 0; i < std::max(members.size(), others.size()); ++i) {
    const bool is_first =
        i < members.size() && (i >= others.size() || members[i].key < others[i].key);
    if (is_first) reject(members[i].value, fmt::format("no such key, as in {}", other.path()));
    if (i >= members.size() || others[i].key < members[i].key) {
      reject(others[i].value, fmt::format("no such key, as in {}", one.path()));
    }
    require_same(members[i].value, others[i].value);
  }
}

void require_same_items(const JsonValue& one, const JsonValue& other) {
  if (one.size() != other.size()) {
    one.reject(ErrorCode::kConfigValue, "two keys describe the quantised weights, and differ",
               fmt::format("{} items, as {} has", other.size(), other.path()));
  }
  auto item = other.items().begin();
  for (const JsonValue& value : one.items()) {
    require_same(value, *item);
    ++item;
  }
}

void require_same(const JsonValue& one, const JsonValue& other) {
  if (one.is_object() && other.is_object()) return require_same_members(one, other);
  if (one.is_array() && other.is_array()) return require_same_items(one, other);
  if (is_same_scalar(one, other)) return;
  reject(one, fmt::format("{}, as {} has", shown(other), other.path()));
}

}  // namespace

std::optional<JsonValue> find_quantization_settings(const JsonValue& config) {
  std::optional<JsonValue> found;
  for (const std::string_view key : kQuantizationKeys) {
    const auto value = config.find_set(key);
    if (!value) continue;
    // Beside settings a word or a number of that name belongs to something else.
    const bool is_second = found && key == kMlxKey && value->is_object() && found->is_object();
    if (is_second) require_same(*value, *found);
    if (!found) found = value;
  }
  return found;
}

}  // namespace conclave::inline v0::checkpoint

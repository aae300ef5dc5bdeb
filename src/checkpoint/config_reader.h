// Typed, bounded access to the keys of config.json: every value out of range, of the wrong type or
// absent is an Error that names file, key, value and limit.
#pragma once

#include "checkpoint/architecture.h"
#include "io/json.h"

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

struct SizeRange {
  int64_t low = 0;
  int64_t high = 0;
  std::string_view why = {};  // ", the number of experts"
};

class ConfigReader {
 public:
  // `config` is the object that holds the sizes of the language model. It does not describe layers
  // from `first_extra` on.
  ConfigReader(io::JsonValue config, SizeKeys::Lists lists,
               int64_t first_extra = std::numeric_limits<int64_t>::max())
      : config_(config), lists_(lists), first_extra_(first_extra) {}

  const io::JsonValue& object() const { return config_; }
  // The first spelling that is present; keys whose value is null count as absent.
  std::optional<io::JsonValue> find(const KeyNames& key) const;
  // Whether any spelling is present, null or not.
  bool has(const KeyNames& key) const;

  // The value; if it is a list, the element for `layer`; if absent, `otherwise`. Throws
  // Error(kConfigMissingKey, kConfigValue, kJsonType).
  int64_t size(const SizeKey& key, const SizeRange& range, int64_t layer = 0) const;
  // The number is finite and from 0 to 1e30.
  double number(const NumberKey& key, int64_t layer = 0) const;
  bool flag(const FlagKey& key) const;
  std::string text(const KeyNames& key, std::string_view otherwise) const;

  // The elements of the list `value`, read once. Throws Error(kConfigValue) below `length` of them.
  const std::vector<io::JsonValue>& list(const io::JsonValue& value, int64_t length) const;
  // The value for a layer; an extra layer takes the last one if the list is too short.
  io::JsonValue entry(const io::JsonValue& list, int64_t layer) const;

 private:
  std::optional<io::JsonValue> find_at(const KeyNames& key, int64_t layer) const;

  io::JsonValue config_;
  SizeKeys::Lists lists_;
  int64_t first_extra_;
  // Elements of a list by its path, since they cannot be indexed in place.
  mutable std::map<std::string, std::vector<io::JsonValue>> cache_;
};

std::string render(const io::JsonValue& value);
[[noreturn]] void reject_value(const io::JsonValue& value, std::string fault, std::string limit);
int64_t checked_size(const io::JsonValue& value, const SizeRange& range);

}  // namespace conclave::inline v0::checkpoint

// Bounded JSON documents: config.json, the shard index, a manifest. Size, depth and count have
// limits, keys are unique, text is UTF-8, and every error names the file and the value's path.
#pragma once

#include "conclave/error.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

namespace conclave::inline v0::io {

enum class JsonType : uint8_t { kNull, kBool, kInteger, kFloat, kString, kArray, kObject };

std::string_view to_string(JsonType type) noexcept;  // "an integer"

enum class NonFinite : uint8_t { kReject, kAccept };

struct JsonLimits {
  size_t max_bytes = 100'000'000;
  int max_depth = 64;
  size_t max_values = 4'000'000;  // numbers, strings, literals, arrays and objects together
  // Whether NaN, Infinity and -Infinity are numbers, as Python writes them.
  NonFinite non_finite = NonFinite::kReject;
};

inline constexpr JsonLimits kConfigLimits = {
    .max_bytes = 16'000'000, .max_values = 1'000'000, .non_finite = NonFinite::kAccept};
inline constexpr JsonLimits kIndexLimits = {};

struct JsonMember;
template <class Item>
class JsonRange;

// A handle on one value of a JsonDocument, valid while the document lives (moving the document is
// fine). Cheap to copy. Getters throw Error(kJsonType) naming the path.
class JsonValue {
 public:
  JsonType type() const noexcept;
  bool is_null() const noexcept { return type() == JsonType::kNull; }
  bool is_bool() const noexcept { return type() == JsonType::kBool; }
  bool is_integer() const noexcept { return type() == JsonType::kInteger; }
  bool is_number() const noexcept { return is_integer() || type() == JsonType::kFloat; }
  bool is_string() const noexcept { return type() == JsonType::kString; }
  bool is_array() const noexcept { return type() == JsonType::kArray; }
  bool is_object() const noexcept { return type() == JsonType::kObject; }

  bool as_bool() const;
  // Accepts integer literals only: 8.0 is not one. Literals beyond int64 have the type kFloat.
  int64_t as_int64() const;
  double as_double() const;  // integers too
  std::string_view as_string() const;

  size_t size() const;  // items of an array, members of an object; kJsonType for the others
  // The member of an object; nothing if absent. A member that is null is present.
  std::optional<JsonValue> find(std::string_view key) const;
  // Finds a member like `find`, but null counts as absent: configurations spell "not set" so.
  std::optional<JsonValue> find_set(std::string_view key) const;
  // The member of an object. Throws Error(kConfigMissingKey) naming the path if absent.
  JsonValue at(std::string_view key) const;
  JsonRange<JsonValue> items() const;     // items of an array, in order
  JsonRange<JsonMember> members() const;  // members of an object, in order

  std::string path() const;  // "rope_scaling.factors[3]"; empty for the root
  const std::string& file() const noexcept;
  // Throws an Error for the caller's own rules, with file, path and the value found filled in.
  [[noreturn]] void reject(ErrorCode code, std::string what, std::string expected = {},
                           std::string hint = {}) const;

 private:
  friend class JsonDocument;
  template <class Item>
  friend class JsonRange;
  struct Data;
  JsonValue(const Data* data, uint32_t node) : data_(data), node_(node) {}
  std::optional<JsonValue> next() const noexcept;
  std::string_view key() const noexcept;
  void require(JsonType type) const;

  const Data* data_;
  uint32_t node_;
};

struct JsonMember {
  std::string_view key;
  JsonValue value;
};

class JsonDocument {
 public:
  // `file` is the name for messages. Throws Error 4xx.
  static JsonDocument parse(std::string text, std::string file, const JsonLimits& limits = {});
  static JsonDocument parse(std::span<const std::byte> text, std::string file,
                            const JsonLimits& limits = {});
  JsonDocument(JsonDocument&&) noexcept;
  JsonDocument& operator=(JsonDocument&&) noexcept;
  ~JsonDocument();

  JsonValue root() const noexcept;

 private:
  class Builder;
  explicit JsonDocument(std::unique_ptr<JsonValue::Data> data);
  std::unique_ptr<JsonValue::Data> data_;
};

// Forward range over the children of one value.
template <class Item>
class JsonRange {
 public:
  class iterator {
   public:
    explicit iterator(std::optional<JsonValue> at) : at_(at) {}
    Item operator*() const {
      if constexpr (std::is_same_v<Item, JsonMember>) {
        return {at_->key(), *at_};
      } else {
        return *at_;
      }
    }
    iterator& operator++() {
      at_ = at_->next();
      return *this;
    }
    bool operator==(const iterator& other) const {
      return at_.has_value() == other.at_.has_value() && (!at_ || at_->node_ == other.at_->node_);
    }

   private:
    std::optional<JsonValue> at_;
  };
  explicit JsonRange(std::optional<JsonValue> first) : first_(first) {}
  iterator begin() const { return iterator(first_); }
  iterator end() const { return iterator(std::nullopt); }

 private:
  std::optional<JsonValue> first_;
};

}  // namespace conclave::inline v0::io

// Steps by which a router checks its RouterSpec.
#pragma once

#include "conclave/dtype.h"
#include "conclave/spec.h"

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

namespace conclave::inline v0::routing {

// With the fewest digits: std::to_string would show 1e-20 as zero.
std::string text(double value);

// Throws Error(kInvalidArgument): "RouterSpec.<field> is out of range".
[[noreturn]] void refuse_field(std::string_view field, std::string found, std::string limit);
void check_range(std::string_view field, int64_t value, int64_t low, int64_t high);
void check_between(std::string_view field, double value, double low, double high);
void check_finite(std::string_view field, double value);
void check_not_negative(std::string_view field, double value);
template <class Choice>
void check_choice(std::string_view field, Choice value, Choice last) {
  check_range(field, static_cast<int64_t>(value), 0, static_cast<int64_t>(last));
}

// Refuses fields that a rule does not read: a value that changes nothing is a misunderstanding.
class UnusedFields {
 public:
  explicit UnusedFields(const RouterSpec& router) : rule_(router.name) {}

  [[noreturn]] void refuse(std::string_view field, std::string found, std::string unused) const;

  template <class Value>
  void must_be(std::string_view field, const Value& value,
               std::initializer_list<Value> allowed) const {
    for (const Value& candidate : allowed) {
      if (value == candidate) return;
    }
    refuse(field, show(value), show(*allowed.begin()));
  }

 private:
  static std::string show(bool value) { return value ? "true" : "false"; }
  static std::string show(double value) { return text(value); }
  static std::string show(int64_t value) { return std::to_string(value); }
  static std::string show(uint64_t value) { return std::to_string(value); }
  static std::string show(std::string_view value) { return std::string(value); }
  template <class Choice>
    requires std::is_enum_v<Choice>
  static std::string show(Choice value) {
    return std::to_string(static_cast<int>(value));
  }

  std::string_view rule_;
};

// For rules that choose without a selection bias or groups.
void refuse_choosing(const RouterSpec& router);
// For rules that have their own formula for weights. A family's table may state what the formula
// does anyway, so a truthful `renormalize` passes.
void refuse_weighing(const RouterSpec& router);
void refuse_scales(const RouterSpec& router);
// For rules of their own on a softmax of all logits: every step that a spec could choose besides.
void refuse_all_but_softmax(const RouterSpec& router);

}  // namespace conclave::inline v0::routing

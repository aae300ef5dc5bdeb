#include "core/shared_facts.h"
#include "core/spec_fields.h"

#include "conclave/routing_record.h"

#include <bit>
#include <concepts>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

namespace conclave::inline v0 {
namespace {

// FNV-1a over the bytes of words: the same in every program and on every machine.
class SpecHash {
 public:
  void add(uint64_t word) {
    for (int32_t byte = 0; byte < 8; ++byte) {
      value_ = (value_ ^ ((word >> (8 * byte)) & 0xFFU)) * 0x100000001B3U;
    }
  }
  void add(std::string_view text) {
    add(uint64_t{text.size()});
    for (const char letter : text) add(static_cast<uint64_t>(static_cast<unsigned char>(letter)));
  }
  void add(const std::string& text) { add(std::string_view(text)); }
  template <class Number>
    requires std::integral<Number> || std::is_enum_v<Number>
  void add(Number number) {
    add(static_cast<uint64_t>(number));
  }
  void add(double number) { add(std::bit_cast<uint64_t>(number)); }
  void add(float number) { add(static_cast<double>(number)); }
  template <class Entry>
  void add(const std::vector<Entry>& list) {
    add(uint64_t{list.size()});
    for (const Entry& entry : list) add(entry);
  }
  void add(const std::map<std::string, double>& options) {
    add(uint64_t{options.size()});
    for (const auto& [name, number] : options) {
      add(name);
      add(number);
    }
  }
  template <class Value>
  void add(const std::optional<Value>& value) {
    add(uint64_t{value.has_value()});
    if (value) add(*value);
  }
  // 0 stands for a hash that nobody knows.
  uint64_t value() const { return value_ != 0 ? value_ : 1; }

 private:
  uint64_t value_ = 0xCBF29CE484222325U;
};

}  // namespace

RecordedLayer RecordedLayer::of(int64_t layer, const MoeSpec& spec) {
  SpecHash hash;
  for_each_field(spec, "", [&hash](const std::string& name, const auto& value) {
    hash.add(name);
    hash.add(value);
  });
  const int64_t slots = conclave::num_slots(spec);
  const int64_t shared = shared_facts(spec).has_slots() ? spec.shared.count : 0;
  return {.layer = layer,
          .num_ids = spec.num_experts + spec.num_zero_experts + shared,
          .num_slots = slots,
          .spec_hash = hash.value()};
}

}  // namespace conclave::inline v0

#include "layer/agreed_values.h"

#include "core/spec_fields.h"
#include "core/word_hash.h"

#include "conclave/error.h"

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

namespace conclave::inline v0 {
namespace {

constexpr int64_t kVersion =
    CONCLAVE_VERSION_MAJOR * 10000 + CONCLAVE_VERSION_MINOR * 100 + CONCLAVE_VERSION_PATCH;

class Hash {
 public:
  void add(std::integral auto value) { words_.add(value); }
  void add(double value) { add(std::bit_cast<uint64_t>(value)); }
  template <class Choice>
    requires std::is_enum_v<Choice>
  void add(Choice value) {
    add(static_cast<int64_t>(value));
  }
  void add(std::string_view text) {
    add(text.size());
    for (const char letter : text) add(letter);
  }
  void add(const std::string& text) { add(std::string_view(text)); }
  template <class Entry>
  void add(const std::vector<Entry>& list) {
    add(list.size());
    for (const Entry& entry : list) add(entry);
  }
  void add(const std::map<std::string, double>& options) {
    add(options.size());
    for (const auto& [name, value] : options) {
      add(name);
      add(value);
    }
  }
  template <class Value>
  void add(const std::optional<Value>& value) {
    add(value.has_value());
    if (value) add(*value);
  }
  void add(const std::shared_ptr<const TuningTable>& table) { add(table != nullptr); }
  int64_t value() const { return static_cast<int64_t>(words_.value()); }

 private:
  WordHash words_;
};

// Numbers and choices are themselves, so that an error shows them; all else is hashed.
template <class Value>
int64_t value_of(const Value& value) {
  if constexpr (std::is_integral_v<Value> || std::is_enum_v<Value>) {
    return static_cast<int64_t>(value);
  } else {
    Hash hash;
    hash.add(value);
    return hash.value();
  }
}

constexpr std::array kNotCompared = {
    FieldNotCompared{"has_gate", "a rank may have its logits from elsewhere"},
    FieldNotCompared{"router.simulated", "ranks with tokens of their own may draw differently"},
    FieldNotCompared{"options.kernel", "kernels of one arithmetic have the same bits"},
    FieldNotCompared{"options.arithmetic", "what the plan made of it is compared"},
    FieldNotCompared{"options.determinism", "it is a promise about this rank's kernels"},
    FieldNotCompared{"options.weights", "it changes no bit"},
    FieldNotCompared{"options.tuning", "it changes no bit"},
    FieldNotCompared{"parallel.ep_rank", "it differs in one group and is compared in the other"},
    FieldNotCompared{"parallel.tp_rank", "likewise"}};

// Types that are left unset are spelled out: another rank may name the same ones.
MoeSpec with_types(MoeSpec spec) {
  spec.quant.activation_dtype = spec.quant.activation_dtype.value_or(spec.weight_dtype);
  spec.shared.weight_dtype = shared_weight_dtype(spec);
  spec.residual.weight_dtype = spec.residual.weight_dtype.value_or(spec.weight_dtype);
  return spec;
}

[[noreturn]] void report(const char* phase, size_t rank, std::string_view name, int64_t theirs,
                         int64_t mine) {
  throw CommError(ErrorCode::kCommMismatch, static_cast<int32_t>(rank), phase,
                  "ranks differ in " + std::string(name) + ": " + std::to_string(theirs) +
                      " there, " + std::to_string(mine) + " here");
}

template <class Entry>
std::vector<Entry> gather(std::span<const Entry> mine, Communicator& communicator,
                          const char* phase) {
  std::vector<Entry> all(mine.size() * static_cast<size_t>(communicator.size()));
  communicator.all_gather(std::as_bytes(mine), std::as_writable_bytes(std::span(all)), phase);
  return all;
}

// Values can be compared in order only where all ranks list the same names.
void compare_lists(std::span<const AgreedValue> values, Communicator& communicator,
                   const char* phase) {
  constexpr std::array<std::string_view, 3> kNames = {
      "the library version", "the number of values that they compare", "what they compare"};
  Hash names;
  for (const AgreedValue& value : values) names.add(value.name);
  const std::array<int64_t, kNames.size()> mine = {kVersion, static_cast<int64_t>(values.size()),
                                                   names.value()};
  const std::vector<int64_t> all = gather(std::span<const int64_t>(mine), communicator, phase);
  for (size_t at = 0; at < all.size(); ++at) {
    const size_t field = at % mine.size();
    if (all[at] != mine[field])
      report(phase, at / mine.size(), kNames[field], all[at], mine[field]);
  }
}

}  // namespace

std::span<const FieldNotCompared> fields_not_compared() { return kNotCompared; }

bool is_compared(std::string_view field) {
  return std::ranges::none_of(kNotCompared, [field](const FieldNotCompared& without) {
    if (!field.starts_with(without.name)) return false;
    return field.size() == without.name.size() || field[without.name.size()] == '.';
  });
}

std::vector<AgreedValue> values_to_agree(const MoeSpec& spec, const LayerOptions& options,
                                         const ParallelSpec& parallel) {
  std::vector<AgreedValue> values;
  const auto add = [&values](const std::string& name, const auto& value) {
    if (is_compared(name)) values.push_back({name, value_of(value)});
  };
  for_each_field(with_types(spec), "", add);
  for_each_field(options, "options.", add);
  for_each_field(parallel, "parallel.", add);
  return values;
}

void compare_values(std::span<const AgreedValue> values, Communicator& communicator,
                    const char* phase) {
  compare_lists(values, communicator, phase);
  std::vector<int64_t> mine;
  for (const AgreedValue& value : values) mine.push_back(value.value);
  const std::vector<int64_t> all = gather(std::span<const int64_t>(mine), communicator, phase);
  for (size_t at = 0; at < all.size(); ++at) {
    const size_t field = at % mine.size();
    if (all[at] != mine[field]) {
      report(phase, at / mine.size(), values[field].name, all[at], mine[field]);
    }
  }
}

}  // namespace conclave::inline v0

#include "checkpoint/layer_rule.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <set>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr SizeRange kLayerNumber = {.low = 0, .high = kMaxHiddenLayers};
constexpr SizeRange kPeriod = {.low = 1, .high = kMaxHiddenLayers};
constexpr std::array<std::string_view, 3> kMoeKinds = {kSparseKind, "moe", "hash_moe"};
constexpr std::string_view kHashKind = "hash_moe";

// Parses "3,4,5" into a set of numbers.
std::set<int64_t> numbers_in(const io::JsonValue& value) {
  std::set<int64_t> numbers;
  std::string_view text = value.as_string();
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), item.size() + 1));
    const size_t first = item.find_first_not_of(' ');
    if (first == std::string_view::npos) continue;
    const std::string_view digits = item.substr(first, item.find_last_not_of(' ') - first + 1);
    int64_t number = -1;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    if (error != std::errc() || end != digits.data() + digits.size() || number < 0 ||
        number > kMaxHiddenLayers) {
      reject_value(value, "is not a list of layers",
                   fmt::format("numbers from 0 to {}, separated by commas", kMaxHiddenLayers));
    }
    numbers.insert(number);
  }
  return numbers;
}

std::set<int64_t> layer_set(const io::JsonValue& value) {
  if (value.is_string()) return numbers_in(value);
  std::set<int64_t> numbers;
  for (const io::JsonValue& item : value.items()) numbers.insert(checked_size(item, kLayerNumber));
  return numbers;
}

using Condition = std::function<bool(int64_t layer)>;

// The one list that decides alone, if the config has it.
std::optional<Condition> explicit_list(const ConfigReader& config, const LayerRule& rule,
                                       int64_t count) {
  if (const auto kinds = config.find(rule.kinds)) {
    const auto* list = &config.list(*kinds, count);
    return [list](int64_t layer) {
      const std::string_view kind = (*list)[static_cast<size_t>(layer)].as_string();
      return std::find(kMoeKinds.begin(), kMoeKinds.end(), kind) != kMoeKinds.end();
    };
  }
  if (const auto pattern = config.find(rule.pattern)) {
    const std::string_view letters = pattern->as_string();
    if (static_cast<int64_t>(letters.size()) < count) {
      reject_value(*pattern, "is too short", fmt::format("at least {} letters", count));
    }
    return [letters](int64_t layer) { return letters[static_cast<size_t>(layer)] == kMoeLetter; };
  }
  if (const auto layers = config.find(rule.moe_layers)) {
    return [set = layer_set(*layers)](int64_t layer) { return set.contains(layer); };
  }
  return std::nullopt;
}

bool is_on(const io::JsonValue& value) {
  return value.is_bool() ? value.as_bool() : checked_size(value, kLayerNumber) != 0;
}

std::vector<Condition> conditions(const ConfigReader& config, const LayerRule& rule,
                                  int64_t count) {
  std::vector<Condition> all;
  if (const auto list = config.find(rule.dense_layers)) {
    if (!list->is_array()) list->items();  // rejects the type
    all.push_back([dense = layer_set(*list)](int64_t layer) { return !dense.contains(layer); });
  }
  if (rule.sparse_step.otherwise) {
    const int64_t step = config.size(rule.sparse_step, kPeriod);
    all.push_back([step](int64_t layer) { return (layer + 1) % step == 0; });
  }
  const auto frequency = config.find(rule.frequency);
  const bool listed = config.find(rule.dense_layers) || (frequency && frequency->is_array());
  if (config.find(rule.first_moe.key) || (rule.first_moe.otherwise && !listed)) {
    const int64_t first = config.size(rule.first_moe, kLayerNumber);
    all.push_back([first](int64_t layer) { return layer >= first; });
  }
  if (frequency && frequency->is_array()) {
    const auto* list = &config.list(*frequency, count);
    all.push_back([list](int64_t layer) { return is_on((*list)[static_cast<size_t>(layer)]); });
  } else if (frequency) {
    const int64_t step = checked_size(*frequency, kPeriod);
    all.push_back([step](int64_t layer) { return layer % step == 0; });
  }
  if (rule.period.otherwise) {
    const int64_t period = config.size(rule.period, kPeriod);
    const int64_t offset = config.size(rule.offset, kLayerNumber);
    all.push_back([=](int64_t layer) { return layer % period == offset; });
  }
  if (!rule.last_moe.empty()) {
    const int64_t last = config.size({rule.last_moe, -1}, {.low = -1, .high = kMaxHiddenLayers});
    all.push_back([last](int64_t layer) { return last < 0 || layer <= last; });
  }
  return all;
}

}  // namespace

int64_t read_num_layers(const ConfigReader& config, const Architecture& architecture) {
  const KeyNames& key = architecture.sizes.num_layers;
  const SizeRange range = {.low = 1, .high = kMaxHiddenLayers};
  if (!config.find(key)) {
    const auto kinds = config.find(architecture.layer_rule.kinds);
    const auto pattern = config.find(architecture.layer_rule.pattern);
    const size_t length = kinds && kinds->is_array() ? kinds->size()
                          : pattern                  ? pattern->as_string().size()
                                                     : 0;
    if (length > 0 && length <= static_cast<size_t>(kMaxHiddenLayers)) {
      return static_cast<int64_t>(length);
    }
  }
  return config.size({.key = key}, range);
}

std::vector<int64_t> moe_layers(const ConfigReader& config, const Architecture& architecture,
                                int64_t count) {
  const LayerRule& rule = architecture.layer_rule;
  std::vector<int64_t> layers;
  if (!config.flag(rule.enabled)) return layers;
  if (rule.zero_experts_make_dense) {
    const auto experts = config.find(architecture.sizes.num_experts);
    if (!experts || (experts->is_integer() && experts->as_int64() == 0)) return layers;
  }
  std::vector<Condition> all;
  if (auto list = explicit_list(config, rule, count)) {
    all.push_back(std::move(*list));
  } else {
    all = conditions(config, rule, count);
  }
  for (int64_t layer = 0; layer < count; ++layer) {
    if (std::all_of(all.begin(), all.end(), [&](const Condition& holds) { return holds(layer); })) {
      layers.push_back(layer);
    }
  }
  return layers;
}

bool is_hash_layer(const ConfigReader& config, const Architecture& architecture, int64_t layer) {
  if (architecture.router.hash.first_layers.empty()) return false;
  if (const auto kinds = config.find(architecture.layer_rule.kinds)) {
    return config.entry(*kinds, layer).as_string() == kHashKind;
  }
  const HashRule& rule = architecture.router.hash;
  return layer < config.size({rule.first_layers, rule.otherwise}, kLayerNumber);
}

}  // namespace conclave::inline v0::checkpoint

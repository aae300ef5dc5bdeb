#include "checkpoint/gguf/trunk/trunk_keys.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr double kLargestSize = 4294967295.0;
[[noreturn]] void refuse_config(std::string reason) {
  throw Error(ErrorCode::kUnsupported, {.what = std::move(reason)});
}

std::optional<double> number_at(const io::JsonValue& object, std::string_view key) {
  const size_t dot = key.find('.');
  if (dot != std::string_view::npos) {
    const std::optional<io::JsonValue> inner = object.find_set(key.substr(0, dot));
    if (!inner || !inner->is_object()) return std::nullopt;
    return number_at(*inner, key.substr(dot + 1));
  }
  const std::optional<io::JsonValue> found = object.find_set(key);
  if (!found) return std::nullopt;
  if (found->is_number()) return found->as_double();
  // Several ids end a text; files have the first.
  if (found->is_array() && found->size() > 0) {
    const io::JsonValue first = *found->items().begin();
    if (first.is_number()) return first.as_double();
  }
  refuse_config(fmt::format("config.json: {} is no number", key));
}

double required(const io::JsonValue& object, std::string_view key) {
  const std::optional<double> number = number_at(object, key);
  if (!number) refuse_config(fmt::format("config.json does not state {}", key));
  return *number;
}

int64_t size_of(double number, std::string_view key) {
  if (number >= 1 && number <= kLargestPart && number == std::floor(number)) {
    return static_cast<int64_t>(number);
  }
  refuse_config(fmt::format("config.json: {} is no size: {}", key, number));
}
int64_t size_at(const io::JsonValue& config, std::string_view key) {
  return size_of(required(config, key), key);
}

// The table's own name for a size of files.
std::string_view config_key(const TrunkTable& table, std::string_view file) {
  for (const auto& group : table.keys) {
    const auto found = std::ranges::find_if(group, [&](const NamedKey& key) {
      return key.file == file && !key.config.empty() && key.use != KeyUse::kDirectory;
    });
    if (found != group.end()) return found->config;
  }
  return file;
}
int64_t query_heads(const TrunkTable& table, const io::JsonValue& config) {
  return size_at(config, config_key(table, "attention.head_count"));
}

int64_t head_size(const TrunkTable& table, const io::JsonValue& config) {
  if (table.has_head_dim) {
    if (const auto size = number_at(config, "head_dim")) return size_of(*size, "head_dim");
  }
  return size_at(config, config_key(table, "embedding_length")) / query_heads(table, config);
}

// rope_parameters of newer configurations, rope_scaling of older ones.
class RopeReader {
 public:
  explicit RopeReader(const io::JsonValue& config) : config_(config) {
    for (const char* key : {"rope_parameters", "rope_scaling"}) {
      if (!object_) object_ = config.find_set(key);
    }
    if (object_ && (!object_->is_object() || object_->find("full_attention"))) {
      refuse_config("config.json: rotations that differ from layer to layer");
    }
  }

  std::optional<double> number(std::string_view key) const {
    if (object_) {
      if (const auto found = number_at(*object_, key)) return found;
    }
    return number_at(config_, key);
  }
  double required_number(std::string_view key) const {
    const auto found = number(key);
    if (!found) refuse_config(fmt::format("config.json does not state {}", key));
    return *found;
  }
  std::string type() const {
    if (!object_) return "default";
    for (const char* key : {"rope_type", "type"}) {
      const auto found = object_->find_set(key);
      if (found && found->is_string()) return std::string(found->as_string());
    }
    return "default";
  }

 private:
  const io::JsonValue& config_;
  std::optional<io::JsonValue> object_;
};

class KeyWriter {
 public:
  KeyWriter(const TrunkTable& table, std::string_view architecture, const io::JsonValue& config)
      : table_(table), architecture_(architecture), config_(config), rope_(config) {}

  std::vector<GgufKey> write(int64_t vocabulary) {
    check_fixed();
    check_windows();
    check_grouping();
    for (const auto& group : table_.keys) {
      for (const NamedKey& key : group) {
        if (key.use == KeyUse::kDirectory) continue;
        if (key.config == "vocab_size") {
          size(key.file, static_cast<double>(vocabulary));
        } else {
          write_key(key);
        }
      }
    }
    write_heads();
    write_rope();
    return std::move(keys_);
  }

 private:
  std::string name(std::string_view key) const {
    if (key.starts_with(kWholeNames)) return std::string(key);
    return fmt::format("{}.{}", architecture_, key);
  }
  void size(std::string_view key, double value) {
    if (value < 0 || value > kLargestSize || value != std::floor(value)) {
      refuse_config(fmt::format("config.json: {} is no size: {}", key, value));
    }
    keys_.push_back(GgufKey::of_u32(name(key), static_cast<uint32_t>(value)));
  }
  void number(std::string_view key, double value) {
    keys_.push_back(GgufKey::of_f32(name(key), static_cast<float>(value)));
  }

  void check_fixed() const {
    for (const FixedKey& key : table_.fixed) {
      const auto found = config_.find_set(key.config);
      if (!found || (found->is_bool() && !found->as_bool())) continue;
      if (found->is_number() && key.number && found->as_double() == *key.number) continue;
      refuse_config(fmt::format("files of the family do not say {} of config.json", key.config));
    }
  }

  void check_windows() const {
    const auto types = config_.find_set("layer_types");
    if (!table_.alternates_windows || !types || !types->is_array()) return;
    bool has_window = true;
    for (const io::JsonValue& type : types->items()) {
      if (type.is_string() && (type.as_string() == "sliding_attention") == has_window) {
        has_window = !has_window;
        continue;
      }
      refuse_config("files of the family have a window in every second layer, config.json has not");
    }
  }

  void check_grouping() const {
    const TrunkSizes sizes = sizes_of_config(table_, config_);
    if (table_.has_grouped_heads || sizes.query_heads == sizes.key_heads) return;
    refuse_config("files of the family have as many heads of keys as of queries");
  }

  void write_key(const NamedKey& key) {
    std::optional<double> value;
    if (!key.config.empty()) value = number_at(config_, key.config);
    if (!value && !key.instead.empty() && key.use == KeyUse::kBoth && key.plus.empty()) {
      value = number_at(config_, key.instead);
    }
    if (!value) value = key.otherwise;
    if (!value && key.is_optional) return;
    if (!value) refuse_config(fmt::format("config.json does not state {}", key.config));
    if (!key.plus.empty()) *value += required(config_, key.plus);
    if (key.kind == KeyKind::kSize) return size(key.file, *value);
    number(key.file, *value);
  }

  void write_heads() {
    if (!table_.says_head_size) return;
    const auto head = static_cast<double>(head_size(table_, config_));
    size("attention.key_length", head);
    size("attention.value_length", head);
    if (table_.rope.width == RopeWidth::kHead) size("rope.dimension_count", head);
    if (table_.rope.width != RopeWidth::kPartial) return;
    const double part =
        rope_.number("partial_rotary_factor").value_or(table_.rope.partial_otherwise);
    size("rope.dimension_count",
         number_at(config_, "rotary_dim").value_or(std::floor(head * part)));
  }

  void write_rope() {
    const std::string type = rope_.type();
    const std::optional<double> inner = rope_.number("rope_theta");
    double base = inner ? *inner : required(config_, table_.rope.base);
    if (type == "dynamic" && table_.rope.has_alpha) {
      const auto head = static_cast<double>(head_size(table_, config_));
      base *= std::pow(rope_.required_number("alpha"), head / (head - 2));
    } else if (type == "linear" || type == "yarn") {
      write_scaling(type);
    } else if (type != "default") {
      refuse_config(fmt::format("config.json: rotations of the type {}", type));
    }
    number("rope.freq_base", base);
  }

  void write_scaling(const std::string& type) {
    keys_.push_back(GgufKey::of_text(name("rope.scaling.type"), type));
    number("rope.scaling.factor", rope_.required_number("factor"));
    if (type != "yarn") return;
    size("rope.scaling.original_context_length",
         rope_.required_number("original_max_position_embeddings"));
    for (const auto& [config, file] : {std::pair("attention_factor", "attn_factor"),
                                       {"beta_fast", "yarn_beta_fast"},
                                       {"beta_slow", "yarn_beta_slow"}}) {
      if (const auto found = rope_.number(config)) {
        number(fmt::format("rope.scaling.{}", file), *found);
      }
    }
    const auto all = rope_.number("mscale_all_dim");
    if (rope_.number("mscale") != all || (all && !table_.rope.has_log_multiplier)) {
      refuse_config("config.json: factors of rotations (mscale) that files do not say");
    }
    if (all) number("rope.scaling.yarn_log_multiplier", 0.1 * *all);
  }

  const TrunkTable& table_;
  std::string_view architecture_;
  const io::JsonValue& config_;
  RopeReader rope_;
  std::vector<GgufKey> keys_;
};

}  // namespace

std::vector<GgufKey> keys_of_config(const TrunkTable& table, std::string_view architecture,
                                    const io::JsonValue& config, int64_t vocabulary) {
  return KeyWriter(table, architecture, config).write(vocabulary);
}

TrunkSizes sizes_of_config(const TrunkTable& table, const io::JsonValue& config) {
  TrunkSizes sizes;
  sizes.query_heads = query_heads(table, config);
  const std::string_view key_heads = config_key(table, "attention.head_count_kv");
  sizes.key_heads = size_of(
      number_at(config, key_heads).value_or(static_cast<double>(sizes.query_heads)), key_heads);
  if (table.says_head_size) return sizes;
  sizes.latent_keys = size_at(config, "qk_nope_head_dim");
  sizes.latent_values = size_at(config, "v_head_dim");
  return sizes;
}

}  // namespace conclave::inline v0::checkpoint

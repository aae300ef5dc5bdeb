#include "checkpoint/config_writer.h"
#include "checkpoint/gguf/trunk/trunk_keys.h"

#include "conclave/error.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <utility>
#include <variant>

namespace conclave::inline v0::checkpoint {
namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void refuse_key(std::string reason) {
  throw Error(ErrorCode::kUnsupported, {.what = std::move(reason)});
}

class KeyReader {
 public:
  KeyReader(std::string_view architecture, const io::GgufFile& file)
      : architecture_(architecture), file_(file) {}

  std::optional<double> number(std::string_view key) const {
    const io::GgufValue* const value = find(key);
    if (value == nullptr) return std::nullopt;
    if (const auto* found = std::get_if<uint64_t>(value)) return static_cast<double>(*found);
    if (const auto* found = std::get_if<int64_t>(value)) return static_cast<double>(*found);
    if (const auto* found = std::get_if<double>(value)) return *found;
    refuse_key(fmt::format("the file's key {} has no single number", name(key)));
  }
  double required(std::string_view key) const {
    const std::optional<double> found = number(key);
    if (!found) refuse_key(fmt::format("the file has no key {}", name(key)));
    return *found;
  }
  int64_t size(std::string_view key) const {
    const double found = required(key);
    if (found < 1 || found > kLargestPart || found != std::floor(found)) {
      refuse_key(fmt::format("the file's key {} is no size: {}", name(key), found));
    }
    return static_cast<int64_t>(found);
  }
  std::string text(std::string_view key) const {
    const io::GgufValue* const value = find(key);
    const auto* const found = value == nullptr ? nullptr : std::get_if<std::string>(value);
    return found == nullptr ? std::string() : *found;
  }

 private:
  std::string name(std::string_view key) const {
    if (key.starts_with(kWholeNames)) return std::string(key);
    return fmt::format("{}.{}", architecture_, key);
  }
  const io::GgufValue* find(std::string_view key) const { return file_.find_value(name(key)); }

  std::string_view architecture_;
  const io::GgufFile& file_;
};

class TrunkConfig {
 public:
  TrunkConfig(const TrunkTable& table, const KeyReader& keys, std::string_view config)
      : table_(table), keys_(keys), config_(Json::parse(config)) {}

  std::string write(const TrunkFacts& facts) {
    config_["architectures"] = {facts.model_class};
    // A later key may need the number of an earlier one.
    for (const auto& group : table_.keys) {
      for (const NamedKey& key : group) {
        if (key.use != KeyUse::kFile) read_key(key);
      }
    }
    put("vocab_size", facts.vocabulary);
    put("tie_word_embeddings", facts.is_tied);
    for (const PresenceKey& key : table_.flags) put(key.config, facts.has_part(key.file));
    read_heads();
    read_rope();
    return config_.dump(2) + "\n";
  }

 private:
  // The layers' configuration goes first: its values stay.
  void put(std::string_view key, Json value) {
    if (!config_.contains(std::string(key))) config_[std::string(key)] = std::move(value);
  }
  static Json json_of(double value, const NamedKey& key) {
    if (key.kind == KeyKind::kNumber) return shortest_decimal(value);
    if (value >= 0 && value <= kLargestPart && value == std::floor(value)) {
      return static_cast<int64_t>(value);
    }
    refuse_key(fmt::format("the file's key {} is no size: {}", key.file, value));
  }

  void read_key(const NamedKey& key) {
    std::optional<double> value = keys_.number(key.file);
    if (!value && !key.instead.empty()) value = keys_.number(key.instead);
    if (!value && key.config == "num_key_value_heads") value = keys_.number("attention.head_count");
    if (!value) value = key.otherwise;
    if (!value && (key.is_optional || config_.contains(std::string(key.config)))) {
      // A class of transformers may have another number where nothing is stated.
      return put(key.config, nullptr);
    }
    if (!value && key.config == "vocab_size") return;
    if (!value) value = keys_.required(key.file);
    if (!key.plus.empty()) {
      const auto other = config_.find(std::string(key.plus));
      if (other != config_.end()) *value -= other->get<double>();
    }
    put(key.config, json_of(*value, key));
  }

  int64_t head_size() const {
    if (keys_.number("attention.key_length")) return keys_.size("attention.key_length");
    return keys_.size("embedding_length") /
           std::max<int64_t>(1, keys_.size("attention.head_count"));
  }

  void read_heads() {
    if (!table_.says_head_size) return;
    const int64_t head = head_size();
    if (table_.has_head_dim) put("head_dim", head);
    if (table_.rope.width != RopeWidth::kPartial) return;
    const double rotated = keys_.number("rope.dimension_count")
                               .value_or(static_cast<double>(head) * table_.rope.partial_otherwise);
    put("partial_rotary_factor", shortest_decimal(rotated / static_cast<double>(head)));
  }

  void read_rope() {
    put("rope_theta", shortest_decimal(keys_.number("rope.freq_base").value_or(10000.0)));
    const std::string type = keys_.text("rope.scaling.type");
    if (type.empty() || type == "none") return;
    if (type != "linear" && type != "yarn") {
      refuse_key(fmt::format("rotations of the type {}", type));
    }
    Json scaling = {{"rope_type", type},
                    {"factor", shortest_decimal(keys_.required("rope.scaling.factor"))}};
    if (type == "yarn") read_yarn(scaling);
    // Newer readers take the base and the rotated part from the same object.
    scaling["rope_theta"] = config_["rope_theta"];
    if (config_.contains("partial_rotary_factor")) {
      scaling["partial_rotary_factor"] = config_["partial_rotary_factor"];
    }
    put("rope_scaling", std::move(scaling));
  }

  void read_yarn(Json& scaling) const {
    scaling["original_max_position_embeddings"] =
        keys_.size("rope.scaling.original_context_length");
    for (const auto& [file, config] : {std::pair("attn_factor", "attention_factor"),
                                       {"yarn_beta_fast", "beta_fast"},
                                       {"yarn_beta_slow", "beta_slow"}}) {
      const auto found = keys_.number(fmt::format("rope.scaling.{}", file));
      if (found) scaling[config] = shortest_decimal(*found);
    }
    if (const auto found = keys_.number("rope.scaling.yarn_log_multiplier")) {
      const Json factor = shortest_decimal(static_cast<double>(static_cast<float>(*found * 10)));
      scaling["mscale"] = factor;
      scaling["mscale_all_dim"] = factor;
    }
    if (!table_.rope.truncates) scaling["truncate"] = false;
  }

  const TrunkTable& table_;
  const KeyReader& keys_;
  Json config_;
};

}  // namespace

std::string config_of_keys(const TrunkTable& table, std::string_view architecture,
                           const io::GgufFile& file, const TrunkFacts& facts,
                           std::string_view config) {
  const KeyReader keys(architecture, file);
  return TrunkConfig(table, keys, config).write(facts);
}

TrunkSizes sizes_of_keys(const TrunkTable& table, std::string_view architecture,
                         const io::GgufFile& file) {
  const KeyReader keys(architecture, file);
  TrunkSizes sizes;
  sizes.query_heads = keys.size("attention.head_count");
  sizes.key_heads = keys.number("attention.head_count_kv") ? keys.size("attention.head_count_kv")
                                                           : sizes.query_heads;
  if (table.says_head_size) return sizes;
  const bool is_apart = keys.number("attention.key_length_mla").has_value();
  sizes.latent_keys = keys.size(is_apart ? "attention.key_length_mla" : "attention.key_length") -
                      keys.size("rope.dimension_count");
  sizes.latent_values =
      keys.size(is_apart ? "attention.value_length_mla" : "attention.value_length");
  return sizes;
}

}  // namespace conclave::inline v0::checkpoint

#include "checkpoint/lora/lora_config.h"

#include "conclave/error.h"
#include "conclave/lora.h"

#include <array>
#include <cmath>
#include <cstdio>

namespace conclave::inline v0 {
namespace {

// Keys that say, where they are set, that a product is not W x + scale B (A x).
struct Variant {
  std::string_view key;
  const char* what;
};
constexpr std::array kVariants = {
    Variant{"use_dora", "DoRA scales the rows of the weights, too"},
    Variant{"lora_bias", "biases of lora_B are not added"},
    Variant{"fan_in_fan_out", "weights that lie columns first are no linear layers"},
    Variant{"use_qalora", "QALoRA pools the columns of rows"},
    Variant{"use_bdlora", "BD-LoRA has factors of blocks"},
    Variant{"alora_invocation_tokens", "activated LoRA begins at a token of the prompt"},
    Variant{"layer_replication", "layers would be repeated"},
    Variant{"arrow_config", "Arrow chooses adapters by a router of its own"},
    Variant{"kasa_config", "KaSA changes the weights, too"},
    Variant{"monteclora_config", "MonteCLoRA draws its factors"}};

// Ways to begin that leave the weights as they are. Others take what the factors hold out of them.
constexpr std::array<std::string_view, 3> kHarmlessInits = {"gaussian", "eva", "orthogonal"};

bool is_set(const io::JsonValue& value) {
  if (value.is_null()) return false;
  if (value.is_bool()) return value.as_bool();
  return !(value.is_array() || value.is_object()) || value.size() != 0;
}

void refuse_variants(const io::JsonValue& root) {
  for (const Variant& variant : kVariants) {
    const auto value = root.find_set(variant.key);
    if (value && is_set(*value)) value->reject(ErrorCode::kUnsupported, variant.what);
  }
  if (const auto bias = root.find_set("bias"); bias && bias->as_string() != "none") {
    bias->reject(ErrorCode::kUnsupported, "biases of the model would change", "none");
  }
  const auto init = root.find_set("init_lora_weights");
  if (!init || init->is_bool()) return;
  for (const std::string_view harmless : kHarmlessInits) {
    if (init->as_string() == harmless) return;
  }
  init->reject(ErrorCode::kUnsupported, "this way to begin changes the weights of the model", {},
               "save the adapter with path_initial_model_for_weight_conversion");
}

double positive(const io::JsonValue& value, double most) {
  const double number = value.as_double();
  if (number > 0 && number <= most) return number;
  value.reject(ErrorCode::kConfigValue, "a value is out of range",
               "above 0, at most " + std::to_string(static_cast<int64_t>(most)));
}

// Versions without a number here are older than those that say theirs.
bool is_before_0_19(const io::JsonValue& root) {
  constexpr int kFirstMinor = 19;
  const auto version = root.find_set("peft_version");
  if (!version) return true;
  const std::string text(version->as_string());
  int major = 0;
  int minor = 0;
  if (std::sscanf(text.c_str(), "%d.%d", &major, &minor) != 2) return true;
  return major == 0 && minor < kFirstMinor;
}

constexpr double kMostAlpha = 1e9;
constexpr size_t kMostPatternLetters = 512;
constexpr size_t kMostRegexLetters = 4096;  // patterns that are no plain names, together

NamePattern pattern_of(std::string_view key, const io::JsonValue& value) {
  if (key.size() > kMostPatternLetters) {
    value.reject(ErrorCode::kConfigValue, "a pattern is too long",
                 std::to_string(kMostPatternLetters) + " letters");
  }
  try {
    return NamePattern(key);
  } catch (const std::regex_error& error) {
    value.reject(ErrorCode::kConfigValue,
                 std::string("a pattern is no regular expression: ") + error.what());
  }
}

}  // namespace

LoraConfig::LoraConfig(const io::JsonValue& root) {
  const io::JsonValue type = root.at("peft_type");
  if (type.as_string() != "LORA") {
    type.reject(ErrorCode::kUnsupported, "adapters of this type are not read", "LORA");
  }
  refuse_variants(root);
  rank_ = positive(root.at("r"), kMostAdapterRank);
  alpha_ = positive(root.at("lora_alpha"), kMostAlpha);
  const auto by_root = root.find_set("use_rslora");
  by_root_ = by_root && by_root->as_bool();
  may_turn_stacks_ = is_before_0_19(root);
  ranks_ = patterns_of(root, "rank_pattern");
  alphas_ = patterns_of(root, "alpha_pattern");
}

LoraConfig::Patterns LoraConfig::patterns_of(const io::JsonValue& root, std::string_view key) {
  Patterns patterns;
  const auto object = root.find_set(key);
  if (!object) return patterns;
  const double most = key == "rank_pattern" ? kMostAdapterRank : kMostAlpha;
  size_t letters = 0;
  for (const io::JsonMember& member : object->members()) {
    patterns.push_back(
        {.name = pattern_of(member.key, member.value), .value = positive(member.value, most)});
    letters += patterns.back().name.regex_letters();
    if (letters <= kMostRegexLetters) continue;
    object->reject(ErrorCode::kConfigValue, "regular expressions are too long together",
                   std::to_string(kMostRegexLetters) + " letters");
  }
  return patterns;
}

double LoraConfig::value_of(const Patterns& patterns, double other, const std::string& name) {
  for (const Pattern& pattern : patterns) {
    if (pattern.name.matches(name)) return pattern.value;
  }
  return other;
}

double LoraConfig::scale_of(const std::string& name, int64_t rank) const {
  const double alpha = value_of(alphas_, alpha_, name);
  const auto divisor = static_cast<double>(rank);
  return alpha / (by_root_ ? std::sqrt(divisor) : divisor);
}

}  // namespace conclave::inline v0

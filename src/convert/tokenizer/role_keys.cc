#include "convert/tokenizer/role_keys.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace conclave::inline v0::conversion {
namespace {

using Json = nlohmann::json;

struct Role {
  std::string_view name;  // "bos" of "bos_token"
  std::string_view key;   // the key of files, as llama.cpp spells it
};
constexpr std::array kRoles = {Role{"bos", "tokenizer.ggml.bos_token_id"},
                               Role{"eos", "tokenizer.ggml.eos_token_id"},
                               Role{"unk", "tokenizer.ggml.unknown_token_id"},
                               Role{"sep", "tokenizer.ggml.seperator_token_id"},
                               Role{"pad", "tokenizer.ggml.padding_token_id"},
                               Role{"mask", "tokenizer.ggml.mask_token_id"}};

// The name that the model's files have for the token of a role: a text, or an object with one.
std::optional<std::string> text_of_role(const TokenizerFiles& files, std::string_view role) {
  const auto found = files.config.find(fmt::format("{}_token", role));
  if (found == files.config.end()) return std::nullopt;
  const Json text = found->is_object() ? found->value("content", Json()) : *found;
  if (!text.is_string()) return std::nullopt;
  return text.get<std::string>();
}

std::optional<std::string> own_text(const Vocabulary& vocabulary, std::string_view role) {
  const auto found = std::ranges::find(vocabulary.roles, role, &RoleToken::role);
  if (found == vocabulary.roles.end()) return std::nullopt;
  return found->text;
}

std::optional<bool> stated_flag(const TokenizerFiles& files, std::string_view role) {
  const auto found = files.config.find(fmt::format("add_{}_token", role));
  if (found == files.config.end() || !found->is_boolean()) return std::nullopt;
  return found->get<bool>();
}

// The steps behind the model that set tokens around a text.
std::vector<Json> templates_of(const TokenizerFiles& files) {
  const Json after = files.tokenizer ? files.tokenizer->value("post_processor", Json()) : Json();
  std::vector<Json> steps = is_type(after, "Sequence")
                                ? after.at("processors").get<std::vector<Json>>()
                                : std::vector<Json>{after};
  std::erase_if(steps, [](const Json& step) { return !is_type(step, "TemplateProcessing"); });
  return steps;
}

enum class TextEnd : uint8_t { kFirst, kLast };

// Whether a template has the token of the role at that end of a text.
std::optional<bool> template_flag(const TokenizerFiles& files, std::string_view role, TextEnd end) {
  std::optional<bool> flag;
  for (const Json& step : templates_of(files)) {
    const Json& parts = step.at("single");
    if (parts.empty()) continue;
    const Json& part = end == TextEnd::kLast ? parts.back() : parts.front();
    const std::optional<std::string> text = text_of_role(files, role);
    flag = part.contains("SpecialToken") &&
           (!text || part.at("SpecialToken").value("id", "") == *text);
  }
  return flag;
}

}  // namespace

std::vector<GgufKey> role_keys(const TokenizerFiles& files, const Vocabulary& vocabulary,
                               std::span<const GgufKey> known) {
  std::vector<GgufKey> keys;
  for (const auto& [role, key] : kRoles) {
    std::optional<std::string> text = text_of_role(files, role);
    const bool is_known = std::ranges::find(known, key, &GgufKey::name) != known.end();
    if (!text && !is_known) text = own_text(vocabulary, role);
    const std::optional<int64_t> id = text ? vocabulary.table.find(*text) : std::nullopt;
    if (id) keys.push_back(GgufKey::of_u32(std::string(key), static_cast<uint32_t>(*id)));
  }
  return keys;
}

std::vector<GgufKey> flag_keys(const TokenizerFiles& files, const Vocabulary& vocabulary) {
  std::vector<GgufKey> keys;
  const auto put = [&](std::string_view role, bool value) {
    keys.push_back(GgufKey::of_bool(fmt::format("tokenizer.ggml.add_{}_token", role), value));
  };
  std::optional<bool> begins = stated_flag(files, "bos");
  if (!begins) begins = template_flag(files, "bos", TextEnd::kFirst);
  put("bos", begins.value_or(vocabulary.begins_unless_told));
  std::optional<bool> ends = stated_flag(files, "eos");
  if (!ends) ends = template_flag(files, "eos", TextEnd::kLast);
  if (ends) put("eos", *ends);
  return keys;
}

}  // namespace conclave::inline v0::conversion

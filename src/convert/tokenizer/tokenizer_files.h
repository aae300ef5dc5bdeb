// The files of a directory that say how its text becomes tokens.
#pragma once

#include <nlohmann/json.hpp>

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace conclave::inline v0::conversion {

struct TokenizerFiles {
  std::filesystem::path directory;
  std::optional<nlohmann::json> tokenizer;          // tokenizer.json
  nlohmann::json added = nlohmann::json::object();  // added_tokens.json
  nlohmann::json config =
      nlohmann::json::object();  // tokenizer_config.json, special_tokens_map.json
  std::optional<std::string> chat_template = std::nullopt;  // chat_template.jinja, or the config
};

// Throws nlohmann::json::exception for text that is no JSON.
TokenizerFiles read_tokenizer_files(const std::filesystem::path& directory);

// The type of tokenizer.json's model, "BPE"; empty without the file.
std::string tokenizer_type(const TokenizerFiles& files);
// tokenizer.model, which is SentencePiece's by its name alone; nothing without the file.
std::optional<std::filesystem::path> sentencepiece_path(const TokenizerFiles& files);
// Whether a part of tokenizer.json has this type.
bool is_type(const nlohmann::json& part, std::string_view type);

}  // namespace conclave::inline v0::conversion

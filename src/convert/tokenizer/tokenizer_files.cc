#include "convert/tokenizer/tokenizer_files.h"

#include "convert/source_model.h"

#include <system_error>

namespace conclave::inline v0::conversion {
namespace {

using Json = nlohmann::json;

std::optional<std::string> read_text(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return std::nullopt;
  return read_whole_file(path);
}

std::optional<Json> read_json(const std::filesystem::path& path) {
  const std::optional<std::string> text = read_text(path);
  if (!text) return std::nullopt;
  return Json::parse(*text);
}

}  // namespace

TokenizerFiles read_tokenizer_files(const std::filesystem::path& directory) {
  TokenizerFiles files{.directory = directory,
                       .tokenizer = read_json(directory / "tokenizer.json")};
  files.added = read_json(directory / "added_tokens.json").value_or(Json::object());
  // The older file counts where the newer one says nothing.
  files.config = read_json(directory / "special_tokens_map.json").value_or(Json::object());
  const Json config = read_json(directory / "tokenizer_config.json").value_or(Json::object());
  for (const auto& [name, value] : config.items()) {
    if (!value.is_null()) files.config[name] = value;
  }
  files.chat_template = read_text(directory / "chat_template.jinja");
  const auto chat = files.config.find("chat_template");
  if (!files.chat_template && chat != files.config.end() && chat->is_string()) {
    files.chat_template = chat->get<std::string>();
  }
  return files;
}

std::string tokenizer_type(const TokenizerFiles& files) {
  return files.tokenizer ? files.tokenizer->at("model").value("type", "") : "";
}

std::optional<std::filesystem::path> sentencepiece_path(const TokenizerFiles& files) {
  std::filesystem::path path = files.directory / "tokenizer.model";
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return std::nullopt;
  return path;
}

bool is_type(const Json& part, std::string_view type) {
  return part.is_object() && part.value("type", "") == type;
}

}  // namespace conclave::inline v0::conversion

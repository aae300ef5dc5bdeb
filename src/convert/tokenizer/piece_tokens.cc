#include "convert/tokenizer/piece_tokens.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <charconv>
#include <cstdint>
#include <set>
#include <string>
#include <utility>

namespace conclave::inline v0::conversion {
namespace {

using Json = nlohmann::json;

int64_t id_of(const std::string& number) {
  int64_t id = -1;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), id);
  if (error == std::errc() && end == number.data() + number.size()) return id;
  throw UnwrittenVocabulary(fmt::format("\"{}\" is no id of a token", number));
}

void add_tokens(const TokenizerFiles& files, TokenTable& table) {
  for (const auto& [text, id] : files.added.items()) {
    table.add(id.get<int64_t>(), {.text = with_spaces(text)});
  }
  const auto put = [&](int64_t id, const Json& token) {
    table.add(id, {.text = with_spaces(token.at("content").get<std::string>()),
                   .is_special = token.value("special", false)});
  };
  const Json decoder = files.config.value("added_tokens_decoder", Json::object());
  for (const auto& [id, token] : decoder.items()) {
    put(id_of(id), token);
  }
  if (!files.tokenizer) return;
  for (const Json& token : files.tokenizer->value("added_tokens", Json::array())) {
    put(token.at("id").get<int64_t>(), token);
  }
}

void check_bytes(const TokenTable& table) {
  std::set<std::string_view> bytes;
  for (size_t id = 0; id < table.texts().size(); ++id) {
    if (table.kinds()[id] == kByte) bytes.insert(table.texts()[id]);
  }
  if (bytes.size() != 256) throw UnwrittenVocabulary("not every byte has a token");
}

}  // namespace

bool is_byte_token(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  return text.size() == 6 && text.starts_with("<0x") && text.ends_with('>') &&
         kDigits.find(text[3]) != std::string_view::npos &&
         kDigits.find(text[4]) != std::string_view::npos;
}

std::string with_spaces(std::string text) {
  for (size_t at = text.find(kPieceSpace); at != std::string::npos;
       at = text.find(kPieceSpace, at)) {
    text.replace(at, kPieceSpace.size(), " ");
  }
  return text;
}

Vocabulary vocabulary_of_pieces(const TokenizerFiles& files, TokenTable table, TextPrefix prefix) {
  add_tokens(files, table);
  check_bytes(table);
  const auto stated = files.config.find("add_prefix_space");
  const bool is_stated = stated != files.config.end() && stated->is_boolean();
  std::vector<GgufKey> keys = {
      GgufKey::of_text("tokenizer.ggml.pre", "default"),
      GgufKey::of_f32s("tokenizer.ggml.scores", table.scores()),
      GgufKey::of_bool("tokenizer.ggml.add_space_prefix",
                       is_stated ? stated->get<bool>() : prefix == TextPrefix::kSpace)};
  return {.model = "llama",
          .table = std::move(table),
          .keys = std::move(keys),
          .roles = {},
          .begins_unless_told = true};
}

}  // namespace conclave::inline v0::conversion

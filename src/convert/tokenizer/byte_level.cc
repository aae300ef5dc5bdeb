// Byte-level BPE of tokenizer.json whose text is split by a rule that llama.cpp has a name for.
#include "convert/tokenizer/split_rules.h"
#include "convert/tokenizer/token_table.h"
#include "convert/tokenizer/vocabulary.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <string>
#include <string_view>

namespace conclave::inline v0::conversion {
namespace {

using Json = nlohmann::json;

void check_not_normalised(const Json& tokenizer) {
  const Json before = tokenizer.value("normalizer", Json());
  const bool is_empty = is_type(before, "Sequence") && before.at("normalizers").empty();
  if (before.is_null() || is_empty || is_type(before, "NFC")) return;
  throw UnwrittenVocabulary("text is normalised");
}

TokenTable byte_level_table(const Json& tokenizer, int64_t rows) {
  TokenTable table(rows);
  for (const auto& [token, id] : tokenizer.at("model").at("vocab").items()) {
    table.put(id.get<int64_t>(), token, kNormal);
  }
  for (const Json& added : tokenizer.value("added_tokens", Json::array())) {
    table.add(added.at("id").get<int64_t>(), {.text = added.at("content").get<std::string>(),
                                              .is_special = added.value("special", false)});
  }
  return table;
}

std::vector<std::string> merges_of(const Json& tokenizer) {
  std::vector<std::string> merges;
  for (const Json& merge : tokenizer.at("model").at("merges")) {
    merges.push_back(merge.is_string() ? merge.get<std::string>()
                                       : fmt::format("{} {}", merge.at(0).get<std::string>(),
                                                     merge.at(1).get<std::string>()));
  }
  return merges;
}

bool has_byte_level(const TokenizerFiles& files) {
  return tokenizer_type(files) == "BPE" &&
         !files.tokenizer->at("model").value("byte_fallback", false);
}

Vocabulary read_byte_level(const TokenizerFiles& files, int64_t rows) {
  const Json& tokenizer = *files.tokenizer;
  check_not_normalised(tokenizer);
  return {.model = "gpt2",
          .table = byte_level_table(tokenizer, rows),
          .keys = {GgufKey::of_text("tokenizer.ggml.pre", split_name(tokenizer)),
                   GgufKey::of_texts("tokenizer.ggml.merges", merges_of(tokenizer))},
          .roles = {}};
}

}  // namespace

constexpr VocabularyKind kByteLevelVocabulary = {.is_kind_of = has_byte_level,
                                                 .read = read_byte_level};

}  // namespace conclave::inline v0::conversion

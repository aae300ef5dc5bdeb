// Byte-level BPE of tokenizer.json whose text is split by a rule that llama.cpp has a name for.
#include "convert/tokenizer/token_table.h"
#include "convert/tokenizer/vocabulary.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <array>
#include <string>
#include <string_view>

namespace conclave::tool {
namespace {

using Json = nlohmann::json;

// The rules by which text is split before merges, as tokenizer.json and llama.cpp call them.
struct SplitRule {
  std::string_view pattern;
  bool ignores_merges = false;  // a word of the vocabulary is not split
  std::string_view name;
};
constexpr std::string_view kWords =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kDigitsAlone =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kByCase =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::array kRules = {
    SplitRule{kDigitsAlone, false, "qwen2"}, SplitRule{kByCase, false, "gpt-4o"},
    SplitRule{kByCase, true, "gpt-4o"},      SplitRule{kWords, false, "dbrx"},
    SplitRule{kWords, true, "llama-bpe"},
};
// The byte-level step splits by its own rule where no other does.
constexpr std::string_view kOwnRule = "gpt-2";

// The one step that splits, and the byte-level one behind it.
std::string_view split_name(const Json& tokenizer) {
  const Json before = tokenizer.value("pre_tokenizer", Json());
  if (is_type(before, "ByteLevel")) {
    if (before.value("use_regex", true) && !before.value("add_prefix_space", true)) return kOwnRule;
    throw UnwrittenVocabulary("the byte-level step has another rule");
  }
  const bool is_pair = is_type(before, "Sequence") && before.at("pretokenizers").size() == 2;
  if (!is_pair) throw UnwrittenVocabulary("text is split in a way without a name in llama.cpp");
  const Json& split = before.at("pretokenizers")[0];
  const Json& bytes = before.at("pretokenizers")[1];
  const bool is_plain = is_type(split, "Split") && split.value("behavior", "") == "Isolated" &&
                        !split.value("invert", false) && is_type(bytes, "ByteLevel") &&
                        !bytes.value("use_regex", true) && !bytes.value("add_prefix_space", true);
  if (!is_plain) throw UnwrittenVocabulary("text is split in a way without a name in llama.cpp");
  const std::string pattern = split.at("pattern").value("Regex", "");
  const bool ignores = tokenizer.at("model").value("ignore_merges", false);
  for (const SplitRule& rule : kRules) {
    if (rule.pattern == pattern && rule.ignores_merges == ignores) return rule.name;
  }
  throw UnwrittenVocabulary("text is split by a pattern without a name in llama.cpp");
}

void check_not_normalised(const Json& tokenizer) {
  const Json before = tokenizer.value("normalizer", Json());
  if (before.is_null() || is_type(before, "NFC")) return;
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

}  // namespace conclave::tool

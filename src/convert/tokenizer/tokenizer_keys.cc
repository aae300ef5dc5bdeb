#include "convert/tokenizer/tokenizer_keys.h"

#include "convert/tokenizer/role_keys.h"
#include "convert/tokenizer/token_table.h"
#include "convert/tokenizer/tokenizer_files.h"
#include "convert/tokenizer/vocabulary.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

namespace conclave::inline v0::conversion {
namespace {

// Byte-level tokenizer.json first: a tokenizer.model beside it is no part of such a model.
constexpr std::array kKinds = {&kByteLevelVocabulary, &kSentencePieceVocabulary,
                               &kMergedPiecesVocabulary};

constexpr int64_t kLargestVocabulary = 1 << 24;

const VocabularyKind& kind_of(const TokenizerFiles& files) {
  for (const VocabularyKind* const kind : kKinds) {
    if (kind->is_kind_of(files)) return *kind;
  }
  throw UnwrittenVocabulary(
      files.tokenizer ? fmt::format("the model of tokenizer.json is {}", tokenizer_type(files))
                      : "there is neither tokenizer.json nor tokenizer.model");
}

// Tokenizer files count more than config.json, from which keys may be there.
void put_key(GgufKey key, std::vector<GgufKey>& keys) {
  const auto same = std::ranges::find(keys, key.name, &GgufKey::name);
  if (same == keys.end()) {
    keys.push_back(std::move(key));
  } else {
    *same = std::move(key);
  }
}

std::vector<GgufKey> keys_of(const TokenizerFiles& files, Vocabulary vocabulary) {
  std::vector<GgufKey> keys = {
      GgufKey::of_text("tokenizer.ggml.model", vocabulary.model),
      GgufKey::of_texts("tokenizer.ggml.tokens", vocabulary.table.texts()),
      GgufKey::of_i32s("tokenizer.ggml.token_type", vocabulary.table.kinds())};
  std::ranges::move(vocabulary.keys, std::back_inserter(keys));
  std::ranges::move(flag_keys(files, vocabulary), std::back_inserter(keys));
  if (files.chat_template) {
    keys.push_back(GgufKey::of_text("tokenizer.chat_template", *files.chat_template));
  }
  return keys;
}

}  // namespace

Support tokenizer_keys(const std::filesystem::path& directory, int64_t rows,
                       std::vector<GgufKey>& keys) {
  try {
    if (rows > kLargestVocabulary) return Support::no("the vocabulary is too large");
    const TokenizerFiles files = read_tokenizer_files(directory);
    Vocabulary vocabulary = kind_of(files).read(files, rows);
    for (GgufKey& key : role_keys(files, vocabulary, keys)) put_key(std::move(key), keys);
    for (GgufKey& key : keys_of(files, std::move(vocabulary))) put_key(std::move(key), keys);
    return Support::yes();
  } catch (const UnwrittenVocabulary& unwritten) {
    return Support::no(unwritten.what());
  } catch (const nlohmann::json::exception& error) {
    return Support::no(fmt::format("its JSON is not as expected: {}", error.what()));
  }
}

}  // namespace conclave::inline v0::conversion

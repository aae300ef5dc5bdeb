#include "convert/tokenizer/tokenizer_keys.h"

#include "convert/tokenizer/token_table.h"
#include "convert/tokenizer/tokenizer_files.h"
#include "convert/tokenizer/vocabulary.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <array>
#include <iterator>

namespace conclave::tool {
namespace {

using Json = nlohmann::json;

constexpr std::array kKinds = {&kByteLevelVocabulary};

constexpr int64_t kLargestVocabulary = 1 << 24;

const VocabularyKind& kind_of(const TokenizerFiles& files) {
  for (const VocabularyKind* const kind : kKinds) {
    if (kind->reads(files)) return *kind;
  }
  throw UnwrittenVocabulary(files.tokenizer ? "the vocabulary is none of byte-level BPE"
                                            : "there is no tokenizer.json");
}

// Whether a text begins with a token that says so: stated, or by what is done with each text.
bool adds_begin(const TokenizerFiles& files) {
  const auto stated = files.config.find("add_bos_token");
  if (stated != files.config.end() && stated->is_boolean()) return stated->get<bool>();
  const Json after = files.tokenizer->value("post_processor", Json());
  const std::string text = after.dump();
  if (text.find("TemplateProcessing") == std::string::npos) return false;
  const size_t single = text.find("\"single\":[{");
  return single != std::string::npos && text.compare(single + 11, 14, "\"SpecialToken\"") == 0;
}

std::vector<GgufKey> keys_of(const TokenizerFiles& files, int64_t rows) {
  std::vector<GgufKey> keys = kind_of(files).keys(files, rows);
  keys.push_back(GgufKey::of_bool("tokenizer.ggml.add_bos_token", adds_begin(files)));
  if (files.chat_template) {
    keys.push_back(GgufKey::of_text("tokenizer.chat_template", *files.chat_template));
  }
  return keys;
}

}  // namespace

Support tokenizer_keys(const std::filesystem::path& directory, int64_t vocabulary,
                       std::vector<GgufKey>& keys) {
  try {
    if (vocabulary > kLargestVocabulary) return Support::no("the vocabulary is too large");
    std::vector<GgufKey> made = keys_of(read_tokenizer_files(directory), vocabulary);
    keys.insert(keys.end(), std::move_iterator(made.begin()), std::move_iterator(made.end()));
    return Support::yes();
  } catch (const UnwrittenVocabulary& unwritten) {
    return Support::no(unwritten.what());
  } catch (const Json::exception& error) {
    return Support::no(fmt::format("its JSON is not as expected: {}", error.what()));
  }
}

}  // namespace conclave::tool

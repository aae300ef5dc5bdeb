#include "convert/tokenizer_keys.h"

#include "convert/source_model.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

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

constexpr int64_t kLargestVocabulary = 1 << 24;

// llama.cpp's kinds of tokens.
enum TokenKind : int32_t { kNormal = 1, kControl = 3, kUserDefined = 4, kUnused = 5 };

struct Unread {
  std::string reason;
};
[[noreturn]] void refuse(std::string reason) { throw Unread{std::move(reason)}; }

std::optional<Json> read_json(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return std::nullopt;
  return Json::parse(read_whole_file(path));
}

bool is_type(const Json& part, std::string_view type) {
  return part.is_object() && part.value("type", "") == type;
}

// The one step that splits, and the byte-level one behind it.
std::string_view split_name(const Json& tokenizer) {
  const Json before = tokenizer.value("pre_tokenizer", Json());
  if (is_type(before, "ByteLevel")) {
    if (before.value("use_regex", true) && !before.value("add_prefix_space", true)) return kOwnRule;
    refuse("the byte-level step has another rule");
  }
  const bool is_pair = is_type(before, "Sequence") && before.at("pretokenizers").size() == 2;
  if (!is_pair) refuse("text is split in a way without a name in llama.cpp");
  const Json& split = before.at("pretokenizers")[0];
  const Json& bytes = before.at("pretokenizers")[1];
  const bool is_plain = is_type(split, "Split") && split.value("behavior", "") == "Isolated" &&
                        !split.value("invert", false) && is_type(bytes, "ByteLevel") &&
                        !bytes.value("use_regex", true) && !bytes.value("add_prefix_space", true);
  if (!is_plain) refuse("text is split in a way without a name in llama.cpp");
  const std::string pattern = split.at("pattern").value("Regex", "");
  const bool ignores = tokenizer.at("model").value("ignore_merges", false);
  for (const SplitRule& rule : kRules) {
    if (rule.pattern == pattern && rule.ignores_merges == ignores) return rule.name;
  }
  refuse("text is split by a pattern without a name in llama.cpp");
}

void check_model(const Json& tokenizer) {
  const Json& model = tokenizer.at("model");
  if (!is_type(model, "BPE") || model.value("byte_fallback", false)) {
    refuse("the vocabulary is none of byte-level BPE");
  }
  const Json before = tokenizer.value("normalizer", Json());
  if (!before.is_null() && !is_type(before, "NFC")) refuse("text is normalised");
}

class Vocabulary {
 public:
  Vocabulary(const Json& tokenizer, int64_t size)
      : tokens_(static_cast<size_t>(size)), kinds_(static_cast<size_t>(size), kUnused) {
    for (size_t id = 0; id < tokens_.size(); ++id) tokens_[id] = fmt::format("[PAD{}]", id);
    for (const auto& [token, id] : tokenizer.at("model").at("vocab").items()) {
      put(id.get<int64_t>(), token, kNormal);
    }
    for (const Json& added : tokenizer.value("added_tokens", Json::array())) {
      const auto text = added.at("content").get<std::string>();
      const bool is_marked = text.starts_with("<|") && text.ends_with("|>");
      put(added.at("id").get<int64_t>(), text,
          added.value("special", false) || is_marked ? kControl : kUserDefined);
    }
  }

  const std::vector<std::string>& tokens() const { return tokens_; }
  const std::vector<int32_t>& kinds() const { return kinds_; }

 private:
  void put(int64_t id, const std::string& token, TokenKind kind) {
    if (id < 0 || id >= static_cast<int64_t>(tokens_.size())) {
      refuse(fmt::format("token {} has no row in the embedding", id));
    }
    tokens_[static_cast<size_t>(id)] = token;
    kinds_[static_cast<size_t>(id)] = kind;
  }

  std::vector<std::string> tokens_;
  std::vector<int32_t> kinds_;
};

std::vector<std::string> merges_of(const Json& tokenizer) {
  std::vector<std::string> merges;
  for (const Json& merge : tokenizer.at("model").at("merges")) {
    merges.push_back(merge.is_string() ? merge.get<std::string>()
                                       : fmt::format("{} {}", merge.at(0).get<std::string>(),
                                                     merge.at(1).get<std::string>()));
  }
  return merges;
}

// Whether a text begins with a token that says so: stated, or by what is done with each text.
bool adds_begin(const Json& tokenizer, const Json& config) {
  const auto stated = config.find("add_bos_token");
  if (stated != config.end() && stated->is_boolean()) return stated->get<bool>();
  const Json after = tokenizer.value("post_processor", Json());
  const std::string text = after.dump();
  if (text.find("TemplateProcessing") == std::string::npos) return false;
  const size_t single = text.find("\"single\":[{");
  return single != std::string::npos && text.compare(single + 11, 14, "\"SpecialToken\"") == 0;
}

std::vector<GgufKey> keys_of(const Json& tokenizer, const Json& config, int64_t vocabulary) {
  check_model(tokenizer);
  const std::string_view split = split_name(tokenizer);
  const Vocabulary words(tokenizer, vocabulary);
  std::vector<GgufKey> keys = {
      GgufKey::of_text("tokenizer.ggml.model", "gpt2"),
      GgufKey::of_text("tokenizer.ggml.pre", split),
      GgufKey::of_texts("tokenizer.ggml.tokens", words.tokens()),
      GgufKey::of_i32s("tokenizer.ggml.token_type", words.kinds()),
      GgufKey::of_texts("tokenizer.ggml.merges", merges_of(tokenizer)),
      GgufKey::of_bool("tokenizer.ggml.add_bos_token", adds_begin(tokenizer, config))};
  const auto chat = config.find("chat_template");
  if (chat != config.end() && chat->is_string()) {
    keys.push_back(GgufKey::of_text("tokenizer.chat_template", chat->get<std::string>()));
  }
  return keys;
}

}  // namespace

Support tokenizer_keys(const std::filesystem::path& directory, int64_t vocabulary,
                       std::vector<GgufKey>& keys) {
  try {
    if (vocabulary > kLargestVocabulary) return Support::no("the vocabulary is too large");
    const std::optional<Json> tokenizer = read_json(directory / "tokenizer.json");
    if (!tokenizer) return Support::no("there is no tokenizer.json");
    Json config = read_json(directory / "tokenizer_config.json").value_or(Json::object());
    const std::filesystem::path chat = directory / "chat_template.jinja";
    std::error_code ignored;
    if (std::filesystem::is_regular_file(chat, ignored)) {
      config["chat_template"] = read_whole_file(chat);
    }
    for (GgufKey& key : keys_of(*tokenizer, config, vocabulary)) keys.push_back(std::move(key));
    return Support::yes();
  } catch (const Unread& unread) {
    return Support::no(unread.reason);
  } catch (const Json::exception& error) {
    return Support::no(fmt::format("its JSON is not as expected: {}", error.what()));
  }
}

}  // namespace conclave::tool

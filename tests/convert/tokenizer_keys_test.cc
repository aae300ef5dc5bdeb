// The keys of a directory's vocabulary: what sentencepiece and gguf-py read of the same files, and
// the reasons why some have none.
#include "convert/tokenizer/tokenizer_keys.h"

#include "io/io_test_support.h"
#include "sentencepiece_bytes.h"

#include "conclave/error.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

namespace conclave::inline v0::conversion {
namespace {

namespace fs = std::filesystem;
using namespace conclave::testing;
using Json = nlohmann::json;

constexpr int64_t kRows = 392;
const fs::path kFolder = "testdata/tokenizers";

Json read_json(const fs::path& path) { return Json::parse(std::ifstream(path)); }

class Keys {
 public:
  explicit Keys(const fs::path& directory, std::vector<GgufKey> keys = {}, int64_t rows = kRows)
      : keys_(std::move(keys)), support_(tokenizer_keys(directory, rows, keys_)) {}

  const Support& support() const { return support_; }
  size_t size() const { return keys_.size(); }
  const GgufKey* find(const std::string& name) const {
    const GgufKey* found = nullptr;
    for (const GgufKey& key : keys_) {
      if (key.name != "tokenizer." + name) continue;
      EXPECT_EQ(found, nullptr) << name << " is there twice";
      found = &key;
    }
    return found;
  }
  void expect(GgufKey key) const {
    const GgufKey* const found = find(key.name);
    ASSERT_NE(found, nullptr) << key.name;
    EXPECT_TRUE(found->value == key.value) << key.name;
  }

 private:
  std::vector<GgufKey> keys_;
  Support support_;
};

void expect_marks(const Keys& keys, const Json& expected) {
  for (const auto& [role, id] : expected["ids"].items()) {
    keys.expect(GgufKey::of_u32("ggml." + role + "_token_id", id.get<uint32_t>()));
  }
  for (const auto& [name, flag] : expected["flags"].items()) {
    keys.expect(GgufKey::of_bool("ggml." + name, flag.get<bool>()));
  }
}

TEST(TokenizerKeys, SentencePiece_AreThoseOfTheReferenceReaders) {
  const fs::path folder = kFolder / "sentencepiece";
  const Keys keys(folder);
  ASSERT_TRUE(keys.support()) << keys.support().reason();
  const Json expected = read_json(folder / "expected.json");
  keys.expect(GgufKey::of_text("ggml.model", "llama"));
  keys.expect(GgufKey::of_text("ggml.pre", "default"));
  keys.expect(GgufKey::of_texts("ggml.tokens", expected["tokens"].get<std::vector<std::string>>()));
  keys.expect(GgufKey::of_f32s("ggml.scores", expected["scores"].get<std::vector<float>>()));
  keys.expect(GgufKey::of_i32s("ggml.token_type", expected["kinds"].get<std::vector<int32_t>>()));
  keys.expect(GgufKey::of_text(
      "chat_template",
      read_json(folder / "tokenizer_config.json")["chat_template"].get<std::string>()));
  expect_marks(keys, expected);
  EXPECT_EQ(keys.find("ggml.merges"), nullptr);
}

std::vector<float> floats_of(const GgufKey& key) {
  constexpr size_t kHead = 4 + 4 + 8;
  std::vector<float> values((key.value.size() - kHead) / sizeof(float));
  std::memcpy(values.data(), key.value.data() + kHead, values.size() * sizeof(float));
  return values;
}

TEST(TokenizerKeys, MergedPieces_HaveTheScoresOfTheModelThatTheyCameFrom) {
  const fs::path folder = kFolder / "merged_pieces";
  const Keys keys(folder);
  ASSERT_TRUE(keys.support()) << keys.support().reason();
  const Json expected = read_json(folder / "expected.json");
  expect_marks(keys, expected);
  auto tokens = expected["tokens"].get<std::vector<std::string>>();
  const std::vector<float> scores = floats_of(*keys.find("ggml.scores"));
  const Json& known = expected["scores"];
  ASSERT_GT(known.size(), 50U);
  for (size_t id = 3 + 256; id < tokens.size(); ++id) {
    if (known.contains(tokens[id])) {
      EXPECT_EQ(scores[id], known[tokens[id]].get<float>()) << tokens[id];
    } else {
      EXPECT_LE(scores[id], -static_cast<float>(known.size())) << tokens[id];
    }
  }
  tokens.insert(tokens.end(), {"<|user|>", "<extra>"});
  for (auto id = static_cast<int64_t>(tokens.size()); id < kRows; ++id) {
    tokens.push_back("[PAD" + std::to_string(id) + "]");
  }
  keys.expect(GgufKey::of_texts("ggml.tokens", tokens));
}

// config.json gives its ids first; tokenizer_config.json is the nearer one, and what neither says
// is the model's.
TEST(TokenizerKeys, IdsOfRoles_AreReplacedWhereTokenizerFilesStateThem) {
  const Keys both(kFolder / "sentencepiece", {GgufKey::of_u32("tokenizer.ggml.eos_token_id", 2),
                                              GgufKey::of_u32("tokenizer.ggml.mask_token_id", 7)});
  both.expect(GgufKey::of_u32("ggml.eos_token_id", 387));
  both.expect(GgufKey::of_u32("ggml.mask_token_id", 7));
  const TemporaryDirectory scratch;
  fs::copy(kFolder / "sentencepiece" / "tokenizer.model", scratch.path() / "tokenizer.model");
  const Keys alone(scratch.path(), {GgufKey::of_u32("tokenizer.ggml.eos_token_id", 9)});
  ASSERT_TRUE(alone.support()) << alone.support().reason();
  alone.expect(GgufKey::of_u32("ggml.bos_token_id", 1));
  alone.expect(GgufKey::of_u32("ggml.eos_token_id", 9));
  alone.expect(GgufKey::of_u32("ggml.unknown_token_id", 0));
  alone.expect(GgufKey::of_bool("ggml.add_bos_token", true));
  EXPECT_EQ(alone.find("ggml.padding_token_id"), nullptr);
  EXPECT_EQ(alone.find("ggml.add_eos_token"), nullptr);
}

std::string pieces(bool with_all_bytes = true) {
  std::string bytes = piece_field("<unk>", 0, 2);
  for (int byte = with_all_bytes ? 0 : 1; byte < 256; ++byte) {
    constexpr std::string_view kDigits = "0123456789ABCDEF";
    const std::string text = {'<',
                              '0',
                              'x',
                              kDigits[static_cast<size_t>(byte / 16)],
                              kDigits[static_cast<size_t>(byte % 16)],
                              '>'};
    bytes += piece_field(text, 0, 6);
  }
  return bytes + piece_field("▁word", -1, 4) + piece_field("a", -2, 1);
}

TEST(TokenizerKeys, PiecesThatAreNeverSplit_AreWordsWithSpaces) {
  const TemporaryDirectory scratch;
  std::ofstream(scratch.path() / "tokenizer.model", std::ios::binary)
      << pieces() << trainer_field({}) << normalizer_field({.adds_prefix = false});
  const Keys keys(scratch.path(), {}, 259);
  ASSERT_TRUE(keys.support()) << keys.support().reason();
  keys.expect(GgufKey::of_bool("ggml.add_space_prefix", false));
  const GgufKey& tokens = *keys.find("ggml.tokens");
  const std::string text(reinterpret_cast<const char*>(tokens.value.data()), tokens.value.size());
  EXPECT_NE(text.find(" word"), std::string::npos);
  EXPECT_EQ(text.find("▁word"), std::string::npos);
}

TEST(TokenizerKeys, ModelsThatLlamaCppReadsOtherwise_AreRefusedWithTheReason) {
  struct Case {
    std::string bytes;
    const char* reason;
    int64_t rows = 300;
  };
  for (const auto& [bytes, reason, rows] :
       {Case{pieces() + trainer_field({.algorithm = 1}), "byte-pair encoding"},
        Case{pieces(), "byte-pair encoding"},
        Case{pieces() + trainer_field({.falls_back_to_bytes = false}), "no tokens for bytes"},
        Case{pieces(false) + trainer_field({}) + normalizer_field({}), "not every byte"},
        Case{pieces() + trainer_field({}), "normalises text"},
        Case{pieces() + trainer_field({}) + normalizer_field({.characters = "map"}),
             "normalises text"},
        Case{pieces() + trainer_field({}) + normalizer_field({.removes_extra_spaces = true}),
             "normalises text"},
        Case{pieces() + trainer_field({}) + normalizer_field({.escapes_spaces = false}),
             "normalises text"},
        Case{pieces() + trainer_field({.spaces_are_suffixes = true}) + normalizer_field({}),
             "at the ends of words"},
        Case{pieces() + trainer_field({}) + normalizer_field({}), "token 258 has no row", 258}}) {
    const TemporaryDirectory scratch;
    std::ofstream(scratch.path() / "tokenizer.model", std::ios::binary) << bytes;
    const Keys keys(scratch.path(), {}, rows);
    EXPECT_FALSE(keys.support());
    EXPECT_NE(keys.support().reason().find(reason), std::string::npos) << keys.support().reason();
    EXPECT_EQ(keys.size(), 0U);
  }
}

TEST(TokenizerKeys, DamagedModel_IsAnErrorThatNamesTheFile) {
  const TemporaryDirectory scratch;
  const fs::path path = scratch.path() / "tokenizer.model";
  fs::copy(kFolder / "sentencepiece" / "tokenizer.model", path);
  fs::resize_file(path, 1000);
  try {
    const Keys keys(scratch.path());
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTokenizerModel);
    EXPECT_EQ(error.detail().file, path.string());
  }
}

// Merges make every piece of a model of SentencePiece, so that it does not matter there.
TEST(TokenizerKeys, PiecesThatAreTakenWhole_HaveTheSameKeys) {
  Json tokenizer = read_json(kFolder / "merged_pieces" / "tokenizer.json");
  std::vector<std::vector<float>> scores;
  for (const bool ignores : {false, true}) {
    const TemporaryDirectory scratch;
    tokenizer["model"]["ignore_merges"] = ignores;
    std::ofstream(scratch.path() / "tokenizer.json") << tokenizer.dump();
    const Keys keys(scratch.path());
    ASSERT_TRUE(keys.support()) << keys.support().reason();
    scores.push_back(floats_of(*keys.find("ggml.scores")));
  }
  EXPECT_EQ(scores[0], scores[1]);
}

TEST(TokenizerKeys, MergesOfAnotherKind_AreRefusedWithTheReason) {
  struct Case {
    std::function<void(Json&)> change;
    const char* reason;
  };
  const std::vector<Case> cases = {
      {[](Json& json) { json["model"]["type"] = "Unigram"; }, "the model of tokenizer.json is Uni"},
      {[](Json& json) { json["model"]["continuing_subword_prefix"] = "##"; }, "no plain ones"},
      {[](Json& json) {
         json["model"]["ignore_merges"] = true;
         json["model"]["vocab"]["jdz"] = 390;
       },
       "\"jdz\" is taken whole"},
      {[](Json& json) { json["model"]["dropout"] = 0.1; }, "no plain ones"},
      {[](Json& json) { json["model"]["merges"].erase(4); }, "by some merges only"},
      {[](Json& json) { json["model"]["vocab"].erase("k"); }, "by some merges only"},
      {[](Json& json) {
         json["model"]["merges"].push_back({"e", "n"});
       },
       "in the order of pieces"},
      {[](Json& json) { json["model"]["merges"][0] = "en"; }, "no second part"},
      {[](Json& json) { json["model"]["vocab"][std::string(600, 'a')] = 390; }, "too long"},
      {[](Json& json) { json["model"]["vocab"].erase("<0x41>"); }, "not every byte"},
      {[](Json& json) {
         json["normalizer"] = {{"type", "NFKC"}};
       },
       "split or normalised"},
      {[](Json& json) { json["pre_tokenizer"]["pretokenizers"][0]["split"] = true; },
       "split or normalised"},
      {[](Json& json) { json["pre_tokenizer"]["pretokenizers"][0]["prepend_scheme"] = "never"; },
       "doubled"},
      {[](Json& json) { json["added_tokens"][0].erase("content"); }, "JSON is not as expected"}};
  const Json tokenizer = read_json(kFolder / "merged_pieces" / "tokenizer.json");
  for (const auto& [change, reason] : cases) {
    const TemporaryDirectory scratch;
    Json changed = tokenizer;
    change(changed);
    std::ofstream(scratch.path() / "tokenizer.json") << changed.dump();
    const Keys keys(scratch.path());
    EXPECT_FALSE(keys.support()) << reason;
    EXPECT_NE(keys.support().reason().find(reason), std::string::npos) << keys.support().reason();
  }
}

Json byte_level_tokenizer(const std::vector<std::string>& patterns) {
  Json steps = Json::array();
  for (const std::string& pattern : patterns) {
    steps.push_back({{"type", "Split"},
                     {"pattern", {{"Regex", pattern}}},
                     {"behavior", "Isolated"},
                     {"invert", false}});
  }
  steps.push_back({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}});
  return {{"normalizer", {{"type", "Sequence"}, {"normalizers", Json::array()}}},
          {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", steps}}},
          {"model",
           {{"type", "BPE"}, {"vocab", {{"a", 0}, {"b", 1}, {"ab", 2}}}, {"merges", {"a b"}}}}};
}

// Rules of several steps are known by all of them, in their order.
TEST(TokenizerKeys, StepsThatSplit_AreKnownByAllOfThem) {
  const std::vector<std::string> deepseek = {
      "\\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
      "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
      "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"};
  const auto keys_of = [](const Json& tokenizer) {
    const TemporaryDirectory scratch;
    std::ofstream(scratch.path() / "tokenizer.json") << tokenizer.dump();
    return Keys(scratch.path(), {}, 3);
  };
  const Keys keys = keys_of(byte_level_tokenizer(deepseek));
  ASSERT_TRUE(keys.support()) << keys.support().reason();
  keys.expect(GgufKey::of_text("ggml.pre", "deepseek-v3"));
  keys.expect(GgufKey::of_text("ggml.model", "gpt2"));
  EXPECT_EQ(keys.find("ggml.scores"), nullptr);

  const std::vector<std::vector<std::string>> others = {
      {},
      {deepseek[0], deepseek[1]},
      {deepseek[1], deepseek[0], deepseek[2]},
      {deepseek[0], deepseek[1], deepseek[2], deepseek[2]},
      {deepseek[0], deepseek[1], deepseek[2], ""},
      std::vector<std::string>(9, "a")};
  for (const std::vector<std::string>& patterns : others) {
    const Keys none = keys_of(byte_level_tokenizer(patterns));
    EXPECT_NE(none.support().reason().find("without a name in llama.cpp"), std::string::npos)
        << none.support().reason();
  }
  Json normalised = byte_level_tokenizer(deepseek);
  normalised["normalizer"]["normalizers"].push_back({{"type", "NFKC"}});
  EXPECT_EQ(keys_of(normalised).support().reason(), "text is normalised");
  Json removed = byte_level_tokenizer(deepseek);
  removed["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed";
  EXPECT_FALSE(keys_of(removed).support());
}

// The steps that published files have before the merges, and whether they set a space before a
// text.
TEST(TokenizerKeys, StepsBeforeMerges_SayWhetherASpaceComesFirst) {
  const Json prepend = {{"type", "Prepend"}, {"prepend", "▁"}};
  const Json replace = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "▁"}};
  const auto sequence = [](std::vector<Json> steps) {
    return Json{{"type", "Sequence"}, {"normalizers", std::move(steps)}};
  };
  const auto pieces_of = [](const char* scheme) {
    return Json{
        {"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", scheme}, {"split", false}};
  };
  struct Case {
    Json normalizer;
    Json splits;
    bool adds_prefix;
  };
  const std::vector<Case> cases = {{sequence({prepend, replace}), nullptr, true},
                                   {replace, nullptr, false},
                                   {nullptr, pieces_of("first"), true},
                                   {nullptr, pieces_of("never"), false},
                                   {replace, pieces_of("always"), true}};
  Json tokenizer = read_json(kFolder / "merged_pieces" / "tokenizer.json");
  for (const auto& [normalizer, splits, adds_prefix] : cases) {
    const TemporaryDirectory scratch;
    tokenizer["normalizer"] = normalizer;
    tokenizer["pre_tokenizer"] = splits;
    std::ofstream(scratch.path() / "tokenizer.json") << tokenizer.dump();
    const Keys keys(scratch.path());
    ASSERT_TRUE(keys.support()) << keys.support().reason();
    keys.expect(GgufKey::of_bool("ggml.add_space_prefix", adds_prefix));
  }
}

}  // namespace
}  // namespace conclave::inline v0::conversion

// Specs as JSON: every member comes back, and what is wrong is named.
#include "capi/handles.h"
#include "capi/spec_json.h"

#include "conclave/checkpoint.h"
#include "conclave/synthetic.h"

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::expect_error;
using testing::Handle;
using testing::make;
using testing::sized;
using testing::text_by;

void expect_same(const MoeSpec& found, const MoeSpec& expected, const std::string& name) {
  EXPECT_EQ(capi::json_of_spec(found).dump(), capi::json_of_spec(expected).dump()) << name;
  EXPECT_TRUE(found.quant == expected.quant) << name;
}

TEST(SpecJson, EveryFamilyOfTestdata_ComesBack) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("testdata/models")) {
    if (!entry.is_directory()) continue;
    const Checkpoint checkpoint = Checkpoint::open(entry.path());
    const MoeSpec& spec = checkpoint.layers()[0].spec;
    expect_same(capi::spec_of_json(capi::json_of_spec(spec).dump()), spec, entry.path());
    ++count;
  }
  EXPECT_GT(count, 80);
}

TEST(SpecJson, EveryPreset_ComesBackThroughTheInterface) {
  for (const ModelPreset& preset : model_presets()) {
    const std::string text = capi::json_of_spec(preset.spec).dump();
    const Handle<conclave_spec> spec = make<conclave_spec>(&conclave_spec_from_json, text.c_str());
    EXPECT_EQ(nlohmann::json::parse(text_by(&conclave_spec_to_json, spec.get())),
              nlohmann::json::parse(text))
        << preset.name;
  }
}

TEST(SpecJson, MembersThatAreLeftOut_HaveTheirDefault) {
  const MoeSpec spec = capi::spec_of_json(
      R"({"num_experts": 8, "activation": "gelu", "quant": null, "router":
          {"score": "sigmoid", "scale": 2, "options": {"ratio": 0.5},
           "simulated": {"replay_ids": [1, -1], "replay_weights": [0.5], "seed": 9}},
          "shared": {"weight_dtype": "bfloat16"}})");
  EXPECT_EQ(spec.num_experts, 8);
  EXPECT_EQ(spec.activation.name, "gelu");
  EXPECT_EQ(spec.router.score, RouterScore::kSigmoid);
  EXPECT_EQ(spec.router.scale, 2.0);
  EXPECT_EQ(spec.router.options.at("ratio"), 0.5);
  EXPECT_EQ(spec.router.simulated.replay_ids, (std::vector<int32_t>{1, -1}));
  EXPECT_EQ(spec.router.simulated.seed, 9U);
  EXPECT_EQ(spec.shared.weight_dtype, DType::kBF16);
  EXPECT_EQ(spec.weight_dtype, DType::kBF16);
}

struct BadSpec {
  const char* text;
  conclave_status status;
  const char* names;
};

TEST(SpecJson, WhatIsWrong_IsNamed) {
  const BadSpec cases[] = {
      {"", CONCLAVE_ERROR_JSON_SYNTAX, ""},
      {"{", CONCLAVE_ERROR_JSON_SYNTAX, ""},
      {"[]", CONCLAVE_ERROR_JSON_TYPE, ""},
      {"{\"top_k\": 1} x", CONCLAVE_ERROR_JSON_SYNTAX, ""},
      {"{\"top_k\": 1, \"top_k\": 2}", CONCLAVE_ERROR_JSON_DUPLICATE_KEY, "top_k"},
      {"{\"top_k\": \"2\"}", CONCLAVE_ERROR_JSON_TYPE, "top_k"},
      {"{\"top_k\": 2.5}", CONCLAVE_ERROR_JSON_TYPE, "top_k"},
      {"{\"topk\": 2}", CONCLAVE_ERROR_INVALID_ARGUMENT, "topk"},
      {"{\"router\": {\"scores\": \"sigmoid\"}}", CONCLAVE_ERROR_INVALID_ARGUMENT, "router.scores"},
      {"{\"router\": {\"score\": \"Sigmoid\"}}", CONCLAVE_ERROR_UNKNOWN_NAME, "router.score"},
      {"{\"weight_dtype\": \"BF17\"}", CONCLAVE_ERROR_DTYPE, "weight_dtype"},
      {"{\"router\": {\"scale\": NaN}}", CONCLAVE_ERROR_JSON_SYNTAX, ""},
      {"{\"router\": {\"simulated\": {\"seed\": -1}}}", CONCLAVE_ERROR_INVALID_ARGUMENT, "seed"},
      {"{\"router\": {\"simulated\": {\"replay_ids\": [4294967296]}}}",
       CONCLAVE_ERROR_INVALID_ARGUMENT, "replay_ids[0]"},
      {"{\"router\": {\"simulated\": {\"replay_weights\": [1e300]}}}",
       CONCLAVE_ERROR_INVALID_ARGUMENT, "replay_weights[0]"},
  };
  for (const BadSpec& bad : cases) {
    SCOPED_TRACE(bad.text);
    conclave_spec* out = nullptr;
    expect_error(conclave_spec_from_json(bad.text, &out), bad.status, bad.names);
    EXPECT_EQ(out, nullptr);
  }
}

TEST(Spec, Info_HasTheSizesOfCalls) {
  const auto spec = make<conclave_spec>(
      &conclave_spec_from_json,
      R"({"num_experts": 8, "top_k": 2, "hidden_size": 16, "intermediate_size": 12,
          "weight_dtype": "F16", "num_zero_experts": 1,
          "shared": {"mode": "add", "intermediate_size": 12}})");
  auto info = sized<conclave_spec_info>();
  ASSERT_EQ(conclave_spec_get_info(spec.get(), &info), CONCLAVE_OK);
  EXPECT_EQ(info.num_logits, 9);
  EXPECT_EQ(info.num_slots, 2);
  EXPECT_EQ(info.weight_dtype, CONCLAVE_DTYPE_F16);
  EXPECT_EQ(info.row_dtype, CONCLAVE_DTYPE_F16);
  EXPECT_EQ(info.has_gate, 1);
  EXPECT_EQ(info.has_shared, 1);
  EXPECT_EQ(info.parameters, 8 * 3 * 16 * 12 + 3 * 16 * 12 + 9 * 16);
  const auto invalid = make<conclave_spec>(&conclave_spec_from_json, "{\"num_experts\": -3}");
  expect_error(conclave_spec_get_info(invalid.get(), &info), CONCLAVE_ERROR_INVALID_ARGUMENT,
               "num_experts");
}

TEST(Spec, OtherRows) {
  const auto spec = make<conclave_spec>(
      &conclave_spec_from_json,
      R"({"num_experts": 4, "top_k": 2, "hidden_size": 64, "intermediate_size": 64,
          "weight_dtype": "I8", "quant": {"weights": "channel"}})");
  const auto rows = make<conclave_spec>(&conclave_spec_with_rows, spec.get(), CONCLAVE_ROWS_INT8);
  EXPECT_NE(text_by(&conclave_spec_to_json, rows.get()).find("\"activations\": \"group\""),
            std::string::npos);
  const auto plain = make<conclave_spec>(&conclave_spec_with_rows, rows.get(), CONCLAVE_ROWS_PLAIN);
  EXPECT_NE(text_by(&conclave_spec_to_json, plain.get()).find("\"activations\": \"none\""),
            std::string::npos);
  conclave_spec* out = nullptr;
  expect_error(conclave_spec_with_rows(spec.get(), 3, &out), CONCLAVE_ERROR_INVALID_ARGUMENT,
               "rows");
}

// Python and C name enumerators alike: the tables of both are texts of one form.
std::set<std::string> words_in(const char* path) {
  std::ostringstream stream;
  stream << std::ifstream(path).rdbuf();
  const std::string text = stream.str();
  std::set<std::string> words;
  for (size_t at = 0; (at = text.find("CONCLAVE_WORD(\"", at)) != std::string::npos; ++at) {
    std::string word = text.substr(at, text.find(')', at) - at);
    std::erase_if(word, [](char c) { return c == ' ' || c == '\n'; });
    words.insert(word);
  }
  return words;
}

TEST(Words, AreThoseOfPython) {
  const std::set<std::string> python = words_in("python/src/names.cc");
  const std::set<std::string> own = words_in("src/capi/words.h");
  EXPECT_GT(own.size(), 50U);
  for (const std::string& word : own) EXPECT_TRUE(python.contains(word)) << word;
}

}  // namespace
}  // namespace conclave

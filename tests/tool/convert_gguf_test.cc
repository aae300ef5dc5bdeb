// Converts GGUF models to other block types: what keeps its bytes, what the reader makes of the
// rest, and what is refused.
#include "convert_tool.h"
#include "support/case_name.h"
#include "support/in_sample.h"

#include "conclave/checkpoint.h"
#include "conclave/gguf.h"
#include "conclave/quantise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <span>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::array kForms = {"q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4"};
constexpr std::array kTwoLevelForms = {"q2_k", "q3_k", "q4_k", "q5_k", "q6_k"};

std::string model_of(const char* name) {
  return "testdata/gguf/" + std::string(name) + "/model.gguf";
}

std::vector<std::byte> bytes_of(const GgufReader& file, const GgufTensorInfo& tensor) {
  std::vector<std::byte> bytes(tensor.bytes);
  file.read(tensor, 0, bytes);
  return bytes;
}

bool is_expert(const std::string& name) {
  return name.find("_exps.weight") != std::string::npos ||
         name.find("_shexp.weight") != std::string::npos;
}

// Errors by expert, found from the values of both models.
void expect_reported_errors(const fs::path& source, const fs::path& result, const Json& report) {
  const Checkpoint before = Checkpoint::open(source);
  const Checkpoint after = Checkpoint::open(result);
  std::map<std::string, QuantiseError> found;
  for (const CheckpointLayer& layer : before.layers()) {
    for (const StoredMatrix& matrix : before.stored_matrices(layer.index)) {
      const QuantiseError error = error_of(values_of(before, layer.index, matrix.id, matrix.expert),
                                           values_of(after, layer.index, matrix.id, matrix.expert));
      const bool shared = matrix.id.mlp() == WeightMlp::kShared;
      found[shared ? matrix.module : matrix.module + "[" + std::to_string(matrix.expert) + "]"].add(
          error);
    }
  }
  ASSERT_FALSE(report["matrices"].empty());
  for (const Json& matrix : report["matrices"]) {
    const std::string name = matrix["name"];
    ASSERT_TRUE(found.contains(name)) << name;
    EXPECT_NEAR(found.at(name).relative(), matrix["relative_error"].get<double>(), 1e-5) << name;
  }
}

// Whether all experts have the form already.
bool has_form(const std::string& model, std::string form) {
  std::ranges::transform(form, form.begin(), [](unsigned char c) { return std::toupper(c); });
  const GgufReader file = GgufReader::open(model);
  return std::ranges::all_of(file.tensors(), [&](const GgufTensorInfo& tensor) {
    return !is_expert(tensor.name) || tensor.type == form;
  });
}

void expect_converted(const std::string& source, const std::string& form) {
  SCOPED_TRACE(form);
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const ToolResult result = convert(source, out, form);
  if (has_form(source, form)) {
    EXPECT_EQ(result.exit_code, 2) << "nothing is left to convert";
    return;
  }
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json report = read_json(out / "conversion.json");
  expect_reported_errors(source, out / "model.gguf", report);
  EXPECT_FALSE(report["layers"].empty());
  expect_verified(out / "model.gguf");
}

void expect_all_converted(const std::string& source, std::span<const char* const> forms) {
  size_t place = first_place();
  for (const char* form : forms) {
    if (in_sample(place++, 3)) expect_converted(source, form);
  }
}

class ConvertGguf : public ::testing::TestWithParam<const char*> {};

TEST_P(ConvertGguf, EveryForm_IsReadAndAgreesWithItsReport) {
  expect_all_converted(model_of(GetParam()), kForms);
}

class ConvertWideGguf : public ::testing::TestWithParam<const char*> {};

TEST_P(ConvertWideGguf, EveryFormOfTwoLevels_IsReadAndAgreesWithItsReport) {
  expect_all_converted(model_of(GetParam()), kTwoLevelForms);
}

std::string test_name(const ::testing::TestParamInfo<const char*>& instance) {
  return case_name(instance.param);
}

// Stacks, fused stacks, values, offsets, factors, shared experts, one tensor for each expert.
INSTANTIATE_TEST_SUITE_P(Models, ConvertGguf,
                         ::testing::Values("qwen3moe-q4_k_m", "deepseek2-q5_0", "qwen3moe-nvfp4",
                                           "glm4moe-q4_1", "gemma4-q8_0", "arctic-q8_0",
                                           "deepseek4-hash", "llama4-bf16", "nemotron-latent"),
                         test_name);
// Rows of 256, which blocks of two levels of scales take.
INSTANTIATE_TEST_SUITE_P(Models, ConvertWideGguf,
                         ::testing::Values("qwen3moe-q4_k_m", "minimax-m2-iq3", "llama-tq"),
                         test_name);

TEST(ConvertGgufFile, KeepMakesTheMixOfQ4KM) {
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const ToolResult mixed = convert(model_of("llama-tq"), out, "q4_k",
                                   {"--keep", "*ffn_down_exps=q6_k", "--scales", "search"});
  ASSERT_EQ(mixed.exit_code, 0) << mixed.err;
  const GgufReader file = GgufReader::open(out / "model.gguf");
  EXPECT_EQ(file.find("blk.0.ffn_down_exps.weight")->type, "Q6_K");
  EXPECT_EQ(file.find("blk.0.ffn_gate_exps.weight")->type, "Q4_K");
  EXPECT_EQ(file.find("blk.0.ffn_up_exps.weight")->type, "Q4_K");
  EXPECT_EQ(run_tool({"verify", (out / "model.gguf").string()}).exit_code, 0);
}

TEST(ConvertGgufFile, OtherTensorsAndKeys_KeepTheirBytes) {
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const std::string source = model_of("gpt-oss-mxfp4");
  ASSERT_EQ(convert(source, out, "q5_1").exit_code, 0);
  const GgufReader before = GgufReader::open(source);
  const GgufReader after = GgufReader::open(out / "model.gguf");
  ASSERT_EQ(before.tensors().size(), after.tensors().size());
  int64_t copied = 0;
  for (size_t i = 0; i < before.tensors().size(); ++i) {
    const GgufTensorInfo& tensor = before.tensors()[i];
    const GgufTensorInfo& same = after.tensors()[i];
    EXPECT_EQ(same.name, tensor.name) << "the order stays";
    EXPECT_EQ(same.shape, tensor.shape);
    if (is_expert(tensor.name)) {
      EXPECT_EQ(same.type, "Q5_1");
      continue;
    }
    EXPECT_EQ(same.type, tensor.type);
    EXPECT_EQ(bytes_of(after, same), bytes_of(before, tensor)) << tensor.name;
    ++copied;
  }
  EXPECT_GT(copied, 4);
  std::map<std::string, std::vector<std::byte>> keys;
  for (const GgufKey& key : after.keys()) keys[key.name] = key.value;
  EXPECT_EQ(keys.extract("general.file_type").empty(), false);
  EXPECT_EQ(keys.extract("general.quantization_version").empty(), false);
  for (const GgufKey& key : before.keys()) {
    if (key.name == "general.file_type" || key.name == "general.quantization_version") continue;
    EXPECT_EQ(keys.at(key.name), key.value) << key.name;
    keys.erase(key.name);
  }
  EXPECT_TRUE(keys.empty());
}

// The bytes are those that the quantiser, which its own test compares with gguf-py, makes of the
// values that the source has.
TEST(ConvertGgufFile, Blocks_AreThoseOfTheValues) {
  const std::string source = model_of("llama4-bf16");
  const GgufReader before = GgufReader::open(source);
  const Checkpoint model = Checkpoint::open(source);
  const ScratchDirectory scratch;
  ASSERT_EQ(convert(source, scratch / "out", "q4_1").exit_code, 0);
  const GgufReader after = GgufReader::open(scratch / "out" / "model.gguf");
  const BlockQuantiser quantiser("Q4_1", ScaleRule::kAmax);
  std::vector<std::byte> expected;
  for (int64_t expert = 0; expert < model.layers().front().spec.num_experts; ++expert) {
    const std::vector<float> values =
        values_of(model, model.layers().front().index, weights::kDown, expert);
    const auto cols = static_cast<int64_t>(before.find("blk.0.ffn_down_exps.weight")->shape[2]);
    const QuantisedRows rows =
        quantiser.quantise(values, static_cast<int64_t>(values.size()) / cols, cols);
    expected.insert(expected.end(), rows.codes.begin(), rows.codes.end());
  }
  EXPECT_EQ(bytes_of(after, *after.find("blk.0.ffn_down_exps.weight")), expected);
}

TEST(ConvertGgufFile, KeepAndLayers_MixForms) {
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const ToolResult mixed =
      convert("testdata/gguf/llama-split/model-00001-of-00003.gguf", out, "q4_0",
              {"--layers", "1", "--keep", "*ffn_down_exps=q5_1", "--keep", "*ffn_up_exps=bf16"});
  ASSERT_EQ(mixed.exit_code, 0) << mixed.err;
  const GgufReader file = GgufReader::open(out / "model.gguf");
  EXPECT_EQ(file.find("blk.0.ffn_down_exps.weight")->type, "Q8_0");
  EXPECT_EQ(file.find("blk.1.ffn_down_exps.weight")->type, "Q5_1");
  EXPECT_EQ(file.find("blk.1.ffn_gate_exps.weight")->type, "Q4_0");
  EXPECT_EQ(file.find("blk.1.ffn_up_exps.weight")->type, "BF16");
  EXPECT_EQ(file.alignment(), 64U);
  EXPECT_NE(mixed.out.find("to q4_0, some bf16, q5_1, scales"), std::string::npos) << mixed.out;
  EXPECT_NE(read_text(out / "conversion.html").find("experts as q4_0, some bf16, q5_1"),
            std::string::npos);
  const Json report = read_json(out / "conversion.json");
  EXPECT_EQ(report["layers"].size(), 1U);
  EXPECT_EQ(report["matrices"][0]["format"], "q5_1") << report["matrices"][0];
  EXPECT_EQ(run_tool({"verify", (out / "model.gguf").string()}).exit_code, 0);
}

TEST(ConvertGgufFile, TensorThatHasTheType_KeepsItsBytes) {
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const std::string source = model_of("glm4moe-q4_1");  // gate and down are Q4_1, up is Q5_1
  ASSERT_EQ(convert(source, out, "q5_1").exit_code, 0);
  const GgufReader before = GgufReader::open(source);
  const GgufReader after = GgufReader::open(out / "model.gguf");
  const char* const up = "blk.0.ffn_up_exps.weight";
  EXPECT_EQ(bytes_of(after, *after.find(up)), bytes_of(before, *before.find(up)));
  EXPECT_EQ(after.find("blk.0.ffn_gate_exps.weight")->type, "Q5_1");
  const ToolResult nothing = convert(model_of("llama-q4_0"), scratch / "no", "q4_0");
  EXPECT_EQ(nothing.exit_code, 2);
  EXPECT_NE(nothing.err.find("nothing is left to convert"), std::string::npos) << nothing.err;
}

// Factors of experts are in the values, and would count twice beside them; the factor of gemma4's
// router is no such one.
TEST(ConvertGgufFile, FactorsOfExperts_GoIntoTheBlocks) {
  const ScratchDirectory scratch;
  ASSERT_EQ(convert(model_of("qwen3moe-nvfp4"), scratch / "a", "q8_0").exit_code, 0);
  const GgufReader nvfp4 = GgufReader::open(model_of("qwen3moe-nvfp4"));
  EXPECT_NE(nvfp4.find("blk.0.ffn_up_exps.scale"), nullptr);
  const GgufReader result = GgufReader::open(scratch / "a" / "model.gguf");
  EXPECT_EQ(result.find("blk.0.ffn_up_exps.scale"), nullptr);
  ASSERT_EQ(convert(model_of("gemma4-q8_0"), scratch / "b", "q4_0").exit_code, 0);
  const GgufReader gemma = GgufReader::open(scratch / "b" / "model.gguf");
  EXPECT_NE(gemma.find("blk.0.ffn_down_exps.scale"), nullptr);
}

TEST(ConvertGgufFile, Shards_AreThePartsOfOneModel) {
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const std::string source = model_of("qwen3moe-q4_k_m");
  ASSERT_EQ(convert(source, out, "q8_0", {"--shard-size", "300kB"}).exit_code, 0);
  const GgufReader file = GgufReader::open(out / "model-00001-of-00003.gguf");
  EXPECT_EQ(file.paths().size(), 3U);
  EXPECT_EQ(file.tensors().size(), GgufReader::open(source).tensors().size());
  expect_verified(out / "model-00001-of-00003.gguf", 4);
}

TEST(ConvertGgufFile, DirectoryOfOneFile_IsThatFile) {
  const ScratchDirectory scratch;
  const std::string folder = "testdata/gguf/llama-tq";
  for (const std::string form : {"q8_0", "int8-channel"}) {
    const ToolResult result = convert(folder, scratch / form, form);
    ASSERT_EQ(result.exit_code, 0) << form << ": " << result.err;
    expect_verified(scratch / form);
  }
  // What a conversion has made is such a directory, too.
  const ToolResult again = convert((scratch / "q8_0").string(), scratch / "again", "q4_0");
  ASSERT_EQ(again.exit_code, 0) << again.err;
  expect_verified(scratch / "again");
}

TEST(ConvertGgufFile, FormsOfTheOtherContainer_AreRefusedWithTheReason) {
  const ScratchDirectory scratch;
  const ToolResult to_directory =
      convert(model_of("qwen3moe-q4_k_m"), scratch / "o.gguf", "int4-group32");
  EXPECT_EQ(to_directory.exit_code, 2);
  EXPECT_NE(to_directory.err.find("--container directory"), std::string::npos) << to_directory.err;
  const ToolResult width = convert(model_of("qwen2moe-f16"), scratch / "o", "q8_0");
  EXPECT_EQ(width.exit_code, 3);
  EXPECT_NE(width.err.find("blk.0.ffn_down_exps"), std::string::npos) << width.err;
  EXPECT_TRUE(fs::is_empty(scratch.path()));
}

TEST(ConvertGgufFile, Destination_IsReplacedOnlyIfItIsAResult) {
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const std::string source = model_of("llama-q4_0");
  ASSERT_EQ(convert(source, out, "q8_0").exit_code, 0);
  EXPECT_EQ(convert(source, out, "q5_0").exit_code, 4);
  ASSERT_EQ(convert(source, out, "q5_0", {"--force"}).exit_code, 0);
  EXPECT_EQ(GgufReader::open(out / "model.gguf").find("blk.0.ffn_up_exps.weight")->type, "Q5_0");
  fs::create_directory(scratch / "own");
  fs::copy(source, scratch / "own" / "model.gguf");
  const ToolResult itself =
      convert((scratch / "own" / "model.gguf").string(), scratch / "own", "q8_0", {"--force"});
  EXPECT_EQ(itself.exit_code, 4) << "the destination holds the source";
  EXPECT_EQ(read_text(scratch / "own" / "model.gguf"), read_text(source));
}

}  // namespace
}  // namespace conclave::testing

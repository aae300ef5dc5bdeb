// Converts to forms of other makers: GPTQ's words and gpt-oss's stacks, decoded here by themselves.
#include "convert_tool.h"
#include "support/case_name.h"

#include "conclave/checkpoint.h"
#include "conclave/quantise.h"
#include "conclave/safetensors.h"
#include "conclave/tensor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

std::string synth(const ScratchDirectory& scratch) {
  const std::string model = (scratch / "model").string();
  const ToolResult written = run_tool({"synth", "-E", "3", "-k", "2", "-H", "128", "-I", "64",
                                       "--shared", "96", "--model-type", "qwen2_moe", model});
  EXPECT_EQ(written.exit_code, 0) << written.err;
  return model;
}

// The weights of a linear layer by the definition of GPTQ's first format.
std::vector<float> decode_gptq(const SafetensorsFile& file, const std::string& name, int bits) {
  const Tensor words = file.load(name + ".qweight");
  const Tensor zeros = file.load(name + ".qzeros");
  const Tensor scales = file.load(name + ".scales");
  const Tensor groups = file.load(name + ".g_idx");
  const int64_t rows = words.shape()[1];
  const int64_t cols = groups.shape()[0];
  const uint32_t mask = (1U << bits) - 1;
  // Code i of a line begins at bit i * bits; `word` gives its words.
  const auto code_at = [&](int64_t i, const auto& word) {
    const int64_t bit = i * bits;
    uint64_t pair = static_cast<uint32_t>(word(bit / 32));
    if (bit % 32 + bits > 32) pair |= uint64_t{static_cast<uint32_t>(word(bit / 32 + 1))} << 32;
    return static_cast<uint32_t>(pair >> (bit % 32)) & mask;
  };
  std::vector<float> scale(static_cast<size_t>(scales.shape()[0] * rows));
  const Shape shape = {scales.shape()[0], rows};
  conclave::convert({.data = scales.as<std::byte>(), .dtype = DType::kF16, .shape = shape},
                    {.data = scale.data(), .dtype = DType::kF32, .shape = shape});
  std::vector<float> values;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      const int64_t group = groups.as<int32_t>()[col];
      const uint32_t code =
          code_at(col, [&](int64_t i) { return words.as<int32_t>()[i * rows + row]; });
      const uint32_t stored = code_at(
          row, [&](int64_t i) { return zeros.as<int32_t>()[group * zeros.shape()[1] + i]; });
      const uint32_t zero = (stored + 1) & mask;
      values.push_back(static_cast<float>(static_cast<int>(code) - static_cast<int>(zero)) *
                       scale[static_cast<size_t>(group * rows + row)]);
    }
  }
  return values;
}

using GptqCase = std::tuple<const char*, int, int64_t, bool>;  // form, bits, group, symmetric
class ConvertGptq : public ::testing::TestWithParam<GptqCase> {};

TEST_P(ConvertGptq, Words_DecodeToTheValuesThatTheReaderGives) {
  const auto& [form, bits, group, symmetric] = GetParam();
  const ScratchDirectory scratch;
  const std::string source = synth(scratch);
  const fs::path out = scratch / "out";
  const ToolResult result = convert(source, out, form);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find(form), std::string::npos) << result.out;
  const SafetensorsFile file = SafetensorsFile::open(out / "model.safetensors");
  const Checkpoint before = Checkpoint::open(source);
  const Checkpoint after = Checkpoint::open(out);
  const Json report = read_json(out / "conversion.json");
  const std::string prefix = "model.layers.0.mlp.";
  const auto expect_matrix = [&](const std::string& name, WeightId id, int64_t expert) {
    const std::vector<float> decoded = decode_gptq(file, prefix + name, bits);
    EXPECT_EQ(decoded, values_of(after, 0, id, expert)) << name;
    const QuantiseError error = error_of(values_of(before, 0, id, expert), decoded);
    const auto& listed = report["matrices"];
    const auto found =
        std::ranges::find_if(listed, [&](const Json& m) { return m["name"] == prefix + name; });
    ASSERT_NE(found, listed.end()) << name;
    EXPECT_NEAR(error.relative(), (*found)["relative_error"].get<double>(), 1e-6);
  };
  expect_matrix("experts.1.gate_proj", weights::kGate, 1);
  expect_matrix("experts.2.down_proj", weights::kDown, 2);
  expect_matrix("shared_expert.up_proj", weights::kSharedUp, 0);
  const Json config = read_json(out / "config.json")["quantization_config"];
  const Json beside = read_json(out / "quantize_config.json");
  for (const Json& each : {config, beside}) {
    EXPECT_EQ(each["quant_method"], "gptq");
    EXPECT_EQ(each["bits"], bits);
    EXPECT_EQ(each["group_size"], group);
    EXPECT_EQ(each["sym"], symmetric);
    EXPECT_EQ(each["desc_act"], false);
    EXPECT_TRUE(each["dynamic"].contains("-:^model\\.layers\\.0\\.mlp\\.gate$")) << each;
  }
  expect_verified(out);
}

INSTANTIATE_TEST_SUITE_P(Forms, ConvertGptq,
                         ::testing::Values(GptqCase{"gptq-int4:group=32", 4, 32, true},
                                           GptqCase{"gptq-int4:group=16,asym", 4, 16, false},
                                           GptqCase{"gptq-int4:group=row,asym", 4, -1, false},
                                           GptqCase{"gptq-int8:group=32,sym", 8, 32, true},
                                           GptqCase{"gptq-int8:group=row", 8, -1, true},
                                           GptqCase{"gptq-int8:group=32,asym", 8, 32, false},
                                           GptqCase{"gptq-int3:group=32", 3, 32, true},
                                           GptqCase{"gptq-int3:group=16,asym", 3, 16, false},
                                           GptqCase{"gptq-int3:group=row,asym", 3, -1, false},
                                           GptqCase{"gptq-int2:group=32", 2, 32, true},
                                           GptqCase{"gptq-int2:group=16,asym", 2, 16, false}),
                         [](const auto& row) { return case_name(std::get<0>(row.param)); });

TEST(ConvertForms, Gptq_RefusesWhatFillsNoWords) {
  const ScratchDirectory scratch;
  const std::string source = bundled("qwen3-moe-tiny");  // 88 and 24 columns
  const ToolResult groups = convert(source, scratch / "out", "gptq-int4");
  EXPECT_EQ(groups.exit_code, 3);
  EXPECT_NE(groups.err.find("a multiple of 128 columns"), std::string::npos) << groups.err;
  EXPECT_EQ(convert(source, scratch / "out", "gptq-int4:group=x").exit_code, 2);
  EXPECT_EQ(convert(source, scratch / "out", "gptq-int4:act").exit_code, 2);
  EXPECT_TRUE(fs::is_empty(scratch.path()));
  EXPECT_EQ(convert(source, scratch / "out", "gptq-int4:group=8").exit_code, 0);
}

TEST(ConvertForms, Gptq_KeepsLayersAndReadsItsOwnResult) {
  const ScratchDirectory scratch;
  const std::string source = synth(scratch);
  const fs::path out = scratch / "out";
  ASSERT_EQ(
      convert(source, out, "gptq-int8:group=32", {"--keep", "*.shared_expert.*=bf16"}).exit_code,
      0);
  const Checkpoint model = Checkpoint::open(out);
  EXPECT_EQ(model.layer(0).spec.weight_dtype, DType::kI8);
  EXPECT_EQ(model.layer(0).spec.shared.weight_dtype, DType::kBF16);
  const fs::path again = scratch / "again";
  const ToolResult back = convert(out.string(), again, "int8-channel");
  ASSERT_EQ(back.exit_code, 0) << back.err;
  EXPECT_FALSE(fs::exists(again / "quantize_config.json"));
  EXPECT_EQ(run_tool({"verify", again.string(), "--tokens", "4"}).exit_code, 0);
}

// Blocks of blocks are the same blocks: the largest code has the largest magnitude.
TEST(ConvertForms, GptOssStacks_ComeBackUnchanged) {
  const std::string source = "testdata/quantised/gpt_oss-mxfp4-wide";
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const ToolResult result = convert(source, out, "gpt-oss-mxfp4");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const SafetensorsFile before = SafetensorsFile::open(fs::path(source) / "model.safetensors");
  const SafetensorsFile after = SafetensorsFile::open(out / "model.safetensors");
  ASSERT_EQ(after.tensors().size(), before.tensors().size());
  for (const TensorInfo& tensor : before.tensors()) {
    const TensorInfo* const same = after.find(tensor.name);
    ASSERT_NE(same, nullptr) << tensor.name;
    EXPECT_EQ(same->shape, tensor.shape) << tensor.name;
    EXPECT_EQ(same->dtype, tensor.dtype) << tensor.name;
  }
  const Checkpoint first = Checkpoint::open(source);
  const Checkpoint second = Checkpoint::open(out);
  for (int64_t expert = 0; expert < 3; ++expert) {
    for (const WeightId id : {weights::kGate, weights::kUp, weights::kDown}) {
      EXPECT_EQ(values_of(second, 0, id, expert), values_of(first, 0, id, expert));
    }
  }
  const Json report = read_json(out / "conversion.json");
  for (const Json& matrix : report["matrices"]) {
    EXPECT_EQ(matrix["relative_error"].get<double>(), 0.0) << matrix;
  }
  EXPECT_EQ(read_json(out / "config.json")["quantization_config"]["quant_method"], "mxfp4");
  EXPECT_EQ(run_tool({"verify", out.string(), "--tokens", "8"}).exit_code, 0);
}

// From tensors of each expert back to stacks, each expert a line of the report.
TEST(ConvertForms, GptOssStacks_AreMadeOfExperts) {
  const ScratchDirectory scratch;
  const std::string source = "testdata/quantised/gpt_oss-mxfp4-wide";
  const fs::path middle = scratch / "middle";
  ASSERT_EQ(convert(source, middle, "int8-channel").exit_code, 0);
  const fs::path out = scratch / "out";
  const ToolResult result = convert(middle.string(), out, "gpt-oss-mxfp4");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json report = read_json(out / "conversion.json");
  EXPECT_EQ(report["matrices"].size(), 6U);
  EXPECT_EQ(report["matrices"][0]["name"], "model.layers.0.mlp.experts.gate_up_proj[0]");
  EXPECT_EQ(report["matrices"][0]["kind"], "gate_up");
  const Checkpoint first = Checkpoint::open(middle);
  const Checkpoint second = Checkpoint::open(out);
  for (const Json& matrix : report["matrices"]) {
    if (matrix["kind"] != "gate_up") continue;
    const std::string name = matrix["name"];
    const int64_t expert = name[name.size() - 2] - '0';
    QuantiseError error;
    for (const WeightId id : {weights::kGate, weights::kUp}) {
      error.add(error_of(values_of(first, 0, id, expert), values_of(second, 0, id, expert)));
    }
    EXPECT_NEAR(error.relative(), matrix["relative_error"].get<double>(), 1e-6);
  }
  EXPECT_EQ(run_tool({"verify", out.string(), "--tokens", "8"}).exit_code, 0);
}

TEST(ConvertForms, GptOssStacks_BelongToThatFamily) {
  const ScratchDirectory scratch;
  const ToolResult other = convert(bundled("mixtral-tiny"), scratch / "out", "gpt-oss-mxfp4");
  EXPECT_EQ(other.exit_code, 3);
  EXPECT_NE(other.err.find("gpt-oss models only"), std::string::npos) << other.err;
  const ToolResult narrow = convert("testdata/models/gpt_oss", scratch / "out", "gpt-oss-mxfp4");
  EXPECT_EQ(narrow.exit_code, 3);
  EXPECT_NE(narrow.err.find("a multiple of 32 columns"), std::string::npos) << narrow.err;
  EXPECT_TRUE(fs::is_empty(scratch.path()));
}

TEST(ConvertForms, Fp8Blocks_HaveTheNamesOfDeepSeek) {
  const ScratchDirectory scratch;
  const std::string source = synth(scratch);
  ASSERT_EQ(convert(source, scratch / "out", "fp8-block").exit_code, 0);
  const SafetensorsFile file = SafetensorsFile::open(scratch / "out" / "model.safetensors");
  const TensorInfo* const scales =
      file.find("model.layers.0.mlp.experts.0.down_proj.weight_scale_inv");
  ASSERT_NE(scales, nullptr);
  EXPECT_EQ(scales->shape, (std::vector<int64_t>{1, 1}));
  EXPECT_EQ(read_json(scratch / "out" / "config.json")["quantization_config"]["weight_block_size"],
            Json({128, 128}));
}

// mlx-lm reads the second key, and writes both; a result in another form has one, which is its own.
TEST(ConvertMlx, SettingsStandUnderBothKeys) {
  const std::string source = "testdata/quantised/qwen3_moe-mlx-8bit";
  const ScratchDirectory scratch;
  const ToolResult result = convert(source, scratch / "mlx", "mlx-int4:group=32");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json config = read_json(scratch / "mlx" / "config.json");
  EXPECT_EQ(config["quantization_config"]["bits"], 4);
  EXPECT_EQ(config["quantization"], config["quantization_config"]);
  const ToolResult other = convert(source, scratch / "other", "int8-channel");
  ASSERT_EQ(other.exit_code, 0) << other.err;
  const Json single = read_json(scratch / "other" / "config.json");
  EXPECT_FALSE(single.contains("quantization")) << single;
  EXPECT_EQ(single["quantization_config"]["quant_method"], "compressed-tensors");
  expect_verified(scratch / "mlx");
  expect_verified(scratch / "other");
}

}  // namespace
}  // namespace conclave::testing

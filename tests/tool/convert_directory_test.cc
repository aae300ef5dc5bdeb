// Directories of the MoE layers of GGUF files: every weight, what the layers mean, the tensors that
// are kept, forms with codes, and the way to GGUF and back.
#include "convert_tool.h"
#include "support/case_name.h"

#include "conclave/checkpoint.h"
#include "conclave/gguf.h"
#include "conclave/gguf_layers.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

std::string model_of(const std::string& name) {
  fs::path file;
  for (const auto& entry : fs::directory_iterator("testdata/gguf/" + name)) {
    const std::string found = entry.path().filename().string();
    if (!found.ends_with(".gguf") || found.find("-of-") != std::string::npos) continue;
    file = entry.path();
  }
  if (!file.empty()) return file.string();
  for (const auto& entry : fs::directory_iterator("testdata/gguf/" + name)) {
    const std::string found = entry.path().filename().string();
    if (found.find("-00001-of-") != std::string::npos) return entry.path().string();
  }
  return "testdata/gguf/" + name;
}

bool has_values(WeightId id) {
  return !id.plane() || *id.plane() == WeightPlane::kWeights || *id.plane() == WeightPlane::kBias;
}

void expect_same_weights(const Checkpoint& before, const Checkpoint& after) {
  ASSERT_EQ(after.layers().size(), before.layers().size());
  int64_t compared = 0;
  for (const CheckpointLayer& layer : before.layers()) {
    const Support same = means_the_same(layer.spec, after.layer(layer.index).spec);
    EXPECT_TRUE(same) << same.reason();
    const auto weights = before.layer_source(layer.index);
    const auto written = after.layer_source(layer.index);
    for (const WeightId id : weights::kAll) {
      if (!has_values(id)) continue;
      const WeightInfo info = weights->describe(id);
      ASSERT_EQ(written->describe(id).count, info.count) << to_string(id);
      for (int64_t expert = 0; expert < info.count; ++expert, ++compared) {
        EXPECT_EQ(values_of(after, layer.index, id, expert),
                  values_of(before, layer.index, id, expert))
            << to_string(id) << " of expert " << expert << ", layer " << layer.index;
      }
    }
  }
  EXPECT_GE(compared, 10);
}

class DirectoryOf : public ::testing::TestWithParam<const char*> {};

TEST_P(DirectoryOf, AsValues_EveryWeightIsTheFiles) {
  const std::string source = model_of(GetParam());
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const ToolResult result = convert(source, out, "f32");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("gguf."), std::string::npos) << result.out;
  const Checkpoint after = Checkpoint::open(out);
  expect_same_weights(Checkpoint::open(source), after);
  const Json report = read_json(out / "conversion.json");
  for (const Json& layer : report["layers"]) EXPECT_LE(layer["median"].get<double>(), 1e-6);
  EXPECT_EQ(read_json(out / "config.json").count("quantization_config"), 0U);
  expect_verified(out);
  EXPECT_EQ(run_tool({"inspect", out.string()}).exit_code, 0);
  EXPECT_EQ(run_tool({"run", out.string()}).exit_code, 0);
}

INSTANTIATE_TEST_SUITE_P(Models, DirectoryOf,
                         ::testing::Values("arctic-q8_0", "deepseek2-greedy", "deepseek2-q5_0",
                                           "gemma4-q8_0", "step35-clamped", "glm4moe-q4_1",
                                           "gpt-oss-mxfp4", "hy_v3-iq", "llama-old", "llama-q4_0",
                                           "llama-split", "llama-tq", "llama4-bf16",
                                           "minimax-m2-iq3", "nemotron-latent", "olmoe-iq4_nl",
                                           "qwen2moe-f16", "qwen3moe-iq4", "qwen3moe-nvfp4",
                                           "qwen3moe-q4_k_m"),
                         [](const auto& instance) { return case_name(instance.param); });

// Experts have the type that was asked for, the MLP beside them keeps float32.
TEST(ConvertDirectory, ResidualMlpOfAnotherType_RunsAndIsTheFiles) {
  for (const char* const form : {"bf16", "f16"}) {
    SCOPED_TRACE(form);
    const ScratchDirectory scratch;
    const std::string source = model_of("arctic-q8_0");
    const fs::path out = scratch / "out";
    const ToolResult result = convert(source, out, form);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const Checkpoint before = Checkpoint::open(source);
    const Checkpoint after = Checkpoint::open(out);
    EXPECT_EQ(after.layer(0).spec.residual.weight_dtype, DType::kF32);
    EXPECT_EQ(values_of(after, 0, weights::kResidualUp, 0),
              values_of(before, 0, weights::kResidualUp, 0));
    expect_verified(out);
  }
}

// A tensor of a GGUF file by what a directory calls it.
std::string kept_name(const GgufTensorInfo& tensor) {
  const std::string name = "gguf." + tensor.name;
  return parse_dtype(tensor.type) ? name : name + "." + std::string(tensor.type);
}

TEST(ConvertDirectory, OtherTensors_KeepTheirBytes) {
  const ScratchDirectory scratch;
  const std::string source = model_of("gemma4-q8_0");
  // Its dense MLP is no part of the MoE layer; a kept layer is none either.
  const ToolResult result = convert(source, scratch / "out", "bf16");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const GgufReader before = GgufReader::open(source);
  const SafetensorsFile after = SafetensorsFile::open(scratch / "out" / "model.safetensors");
  const std::vector<std::string> read = Checkpoint::open(source).layer_tensors(0);
  int64_t kept = 0;
  for (const GgufTensorInfo& tensor : before.tensors()) {
    const TensorInfo* const found = after.find(kept_name(tensor));
    const bool is_read = std::ranges::find(read, tensor.name) != read.end();
    EXPECT_EQ(found == nullptr, is_read) << tensor.name;
    if (found == nullptr) continue;
    ++kept;
    std::vector<std::byte> expected(tensor.bytes);
    std::vector<std::byte> actual(found->bytes);
    before.read(tensor, 0, expected);
    after.read(*found, 0, actual);
    EXPECT_EQ(actual, expected) << tensor.name;
  }
  EXPECT_EQ(kept + static_cast<int64_t>(read.size()),
            static_cast<int64_t>(before.tensors().size()));
}

// Stacks of all experts as gpt-oss is released, with biases of gate and up in turn beside them.
TEST(ConvertDirectory, StacksOfAFile_AreThoseOfGptOss) {
  const ScratchDirectory scratch;
  const std::string source = model_of("gpt-oss-mxfp4");
  const ToolResult result = convert(source, scratch / "out", "gpt-oss-mxfp4");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const SafetensorsFile file = SafetensorsFile::open(scratch / "out" / "model.safetensors");
  for (const char* name : {"gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias",
                           "down_proj_blocks", "down_proj_scales", "down_proj_bias"}) {
    EXPECT_NE(file.find(std::string("model.layers.0.mlp.experts.") + name), nullptr) << name;
  }
  expect_same_weights(Checkpoint::open(source), Checkpoint::open(scratch / "out"));
  expect_verified(scratch / "out");
}

// Values lie as a family is published that has stacks alone.
TEST(ConvertDirectory, StacksOfValues_AreTheFamilys) {
  for (const auto& [model, form] : {std::pair("granitemoe", "f32"), {"granitemoeshared", "bf16"}}) {
    SCOPED_TRACE(model);
    const ScratchDirectory scratch;
    const std::string source = std::string("testdata/models/") + model;
    ASSERT_EQ(convert(source, scratch / "file", "q8_0", {"--keep", "*=f32"}).exit_code, 0);
    const ToolResult back =
        convert((scratch / "file" / "model.gguf").string(), scratch / "back", form);
    ASSERT_EQ(back.exit_code, 0) << back.err;
    expect_same_weights(Checkpoint::open(source), Checkpoint::open(scratch / "back"));
    EXPECT_EQ(Checkpoint::open(scratch / "back").model_type(), model);
    const SafetensorsFile before = SafetensorsFile::open(source + "/model.safetensors");
    const SafetensorsFile after = SafetensorsFile::open(scratch / "back" / "model.safetensors");
    ASSERT_EQ(after.tensors().size(), before.tensors().size());
    for (const TensorInfo& tensor : before.tensors()) {
      ASSERT_NE(after.find(tensor.name), nullptr) << tensor.name;
      EXPECT_EQ(after.find(tensor.name)->shape, tensor.shape) << tensor.name;
    }
  }
}

class DirectoryForm : public ::testing::TestWithParam<const char*> {};

// What the report states of each matrix is what the result's values say.
TEST_P(DirectoryForm, Codes_StandForTheFilesValues) {
  const std::string source = model_of("qwen3moe-q4_k_m");
  const ScratchDirectory scratch;
  const ToolResult result =
      convert(source, scratch / "out", GetParam(), {"--container", "directory"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Checkpoint before = Checkpoint::open(source);
  const Checkpoint after = Checkpoint::open(scratch / "out");
  EXPECT_EQ(after.model_type(), "qwen3_moe");
  const Json report = read_json(scratch / "out" / "conversion.json");
  const int64_t layer = before.layers().front().index;
  for (const StoredMatrix& matrix : after.stored_matrices(layer)) {
    const QuantiseError error = error_of(values_of(before, layer, matrix.id, matrix.expert),
                                         values_of(after, layer, matrix.id, matrix.expert));
    const auto stated = std::ranges::find_if(
        report["matrices"], [&](const Json& each) { return each["name"] == matrix.module; });
    ASSERT_NE(stated, report["matrices"].end()) << matrix.module;
    EXPECT_NEAR(error.relative(), (*stated)["relative_error"].get<double>(), 1e-6) << matrix.module;
    EXPECT_GT(error.relative(), 0) << matrix.module;
  }
  expect_verified(scratch / "out");
}

INSTANTIATE_TEST_SUITE_P(Forms, DirectoryForm,
                         ::testing::Values("fp8-block", "fp8-tensor", "fp8-channel", "int8-channel",
                                           "int8-token", "int4-group32", "mxfp4", "nvfp4",
                                           "gptq-int4:group=32", "gptq-int8:group=32,asym",
                                           "gptq-int3:group=32", "gptq-int2:group=32", "bf16"),
                         [](const auto& instance) { return case_name(instance.param); });

// To GGUF and back nothing is lost but what the blocks lose.
TEST(ConvertDirectory, ThereAndBack_EqualsWithinTheBlocks) {
  for (const char* model :
       {"models/qwen2_moe", "models/deepseek_v3", "models/glm4_moe", "models/mixtral",
        "models/qwen3_next", "models/granitemoeshared", "models/arctic", "models/hy_v3",
        "models/nemotron_h-latent", "models/jamba", "models/llama4", "models/exaone_moe"}) {
    SCOPED_TRACE(model);
    const ScratchDirectory scratch;
    const std::string source = std::string("testdata/") + model;
    ASSERT_EQ(convert(source, scratch / "file", "q8_0", {"--keep", "*=f32"}).exit_code, 0);
    const ToolResult back = convert((scratch / "file" / "model.gguf").string(), scratch / "back",
                                    "f32", {"--shard-size", "60kB"});
    ASSERT_EQ(back.exit_code, 0) << back.err;
    expect_same_weights(Checkpoint::open(source), Checkpoint::open(scratch / "back"));
  }
  const ScratchDirectory scratch;
  const std::string wide = "testdata/quantised/qwen3_moe-compressed-int4-group32";
  ASSERT_EQ(convert(wide, scratch / "file", "q8_0").exit_code, 0);
  ASSERT_EQ(convert((scratch / "file" / "model.gguf").string(), scratch / "back", "f32").exit_code,
            0);
  const Checkpoint before = Checkpoint::open(wide);
  const Checkpoint after = Checkpoint::open(scratch / "back");
  const double error =
      error_of(values_of(before, 0, weights::kUp, 1), values_of(after, 0, weights::kUp, 1))
          .relative();
  EXPECT_GT(error, 0);
  EXPECT_LT(error, 0.01) << "Q8_0";
}

// Two runs write the same bytes, which a run that was ended and goes on relies on.
TEST(ConvertDirectory, Twice_GivesTheSameBytes) {
  const ScratchDirectory scratch;
  const std::string source = model_of("qwen3moe-q4_k_m");
  const std::vector<std::string> shards = {"--shard-size", "100kB"};
  ASSERT_EQ(convert(source, scratch / "a", "int8-channel", shards).exit_code, 0);
  ASSERT_EQ(convert(source, scratch / "b", "int8-channel", shards).exit_code, 0);
  EXPECT_TRUE(fs::exists(scratch / "a" / "model.safetensors.index.json"));
  for (const auto& entry : fs::directory_iterator(scratch / "a")) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("conversion.")) continue;
    EXPECT_EQ(read_text(entry.path()), read_text(scratch / "b" / name)) << name;
  }
}

TEST(ConvertDirectory, WhatNoFamilySays_IsRefusedByName) {
  const ScratchDirectory scratch;
  struct Case {
    const char* model;
    const char* form;
    const char* reason;
  };
  for (const auto& [model, form, reason] :
       {Case{"cohere2moe-average", "f32", "cohere2_moe: layers of the family have another"},
        Case{"deepseek4-hash", "f32", "another activation of shared experts"},
        Case{"qwen3moe-q4_k_m", "int4-group128", "blk.0"}}) {
    const ToolResult result = convert(model_of(model), scratch / "out", form);
    if (std::string_view(form) == "int4-group128" && result.exit_code == 0) {
      fs::remove_all(scratch / "out");
      continue;
    }
    EXPECT_EQ(result.exit_code, 3) << model << result.out;
    EXPECT_NE(result.err.find(reason), std::string::npos) << result.err;
  }
  const ToolResult there =
      convert(model_of("llama-q4_0"), scratch / "out", "q8_0", {"--container", "directory"});
  EXPECT_EQ(there.exit_code, 2);
  EXPECT_NE(there.err.find("--container gguf"), std::string::npos) << there.err;
  const ToolResult values = convert(model_of("llama-q4_0"), scratch / "out.gguf", "int8-channel");
  EXPECT_EQ(values.exit_code, 2);
  EXPECT_NE(values.err.find("--container directory"), std::string::npos) << values.err;
  EXPECT_TRUE(fs::is_empty(scratch.path()));
}

}  // namespace
}  // namespace conclave::testing

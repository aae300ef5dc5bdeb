// GGUF files of the MoE layers of model directories: every weight, what the layers mean, the
// blocks, and the families that have no such file.
#include "convert_tool.h"
#include "support/case_name.h"

#include "conclave/checkpoint.h"
#include "conclave/gguf.h"
#include "conclave/gguf_layers.h"
#include "conclave/quantise.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

bool has_values(WeightId id) {
  return !id.plane() || *id.plane() == WeightPlane::kWeights || *id.plane() == WeightPlane::kBias;
}

// A family, and how far the router's rounding to 16 bits, which GGUF has not, moves the output.
struct Family {
  const char* model;
  double bar;
};
constexpr double kExact = 1e-6;
constexpr double kRounded = 0x1p-7;

class LayersOfFamily : public ::testing::TestWithParam<Family> {};

TEST_P(LayersOfFamily, AsValues_EveryWeightAndOutputIsTheSources) {
  const std::string source = std::string("testdata/") + GetParam().model;
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const ToolResult result = convert(source, out, "q8_0", {"--keep", "*=f32"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Checkpoint before = Checkpoint::open(source);
  const Checkpoint after = Checkpoint::open(out / "model.gguf");
  ASSERT_EQ(after.layers().size(), before.layers().size());
  int64_t compared = 0;
  for (const CheckpointLayer& layer : before.layers()) {
    EXPECT_TRUE(means_the_same(layer.spec, after.layer(layer.index).spec));
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
  EXPECT_GT(compared, 10);
  const Json report = read_json(out / "conversion.json");
  for (const Json& layer : report["layers"]) {
    EXPECT_LE(layer["median"].get<double>(), GetParam().bar) << layer;
  }
  expect_verified(out / "model.gguf");
}

// Groups and biases of the choice, shared experts with and without a gate, projections, a residual
// MLP, weights on the input, experts without a gate; gpt-oss has codes in stacks whose rows of gate
// and up alternate, and biases.
INSTANTIATE_TEST_SUITE_P(
    Models, LayersOfFamily,
    ::testing::Values(Family{"models/mixtral", kRounded}, Family{"models/qwen2_moe", kRounded},
                      Family{"models/qwen3_moe", kExact}, Family{"models/qwen3_next", kRounded},
                      Family{"models/deepseek_v3", kExact}, Family{"models/glm4_moe", kExact},
                      Family{"models/hy_v3", kExact}, Family{"models/exaone_moe", kExact},
                      Family{"models/nemotron_h-latent", kExact}, Family{"models/arctic", kRounded},
                      Family{"models/llama4", kRounded},
                      Family{"models/granitemoeshared", kRounded}, Family{"models/jamba", kRounded},
                      Family{"quantised/gpt_oss-mxfp4", kRounded},
                      Family{"quantised/qwen3_moe-compressed-int4-group32", kRounded}),
    [](const auto& instance) { return case_name(instance.param.model); });

TEST(ConvertLayers, Experts_BecomeTheBlocksOfTheirValues) {
  const std::string source = "testdata/qwen3-moe-tiny";
  const std::string wide = "testdata/quantised/qwen3_moe-compressed-int4-group32";
  const ScratchDirectory scratch;
  EXPECT_EQ(convert(source, scratch / "narrow", "q8_0").exit_code, 3) << "88 columns";
  ASSERT_EQ(convert(wide, scratch / "out", "q5_1").exit_code, 0);
  const Checkpoint model = Checkpoint::open(wide);
  const GgufReader file = GgufReader::open(scratch / "out" / "model.gguf");
  const GgufTensorInfo& up = *file.find("blk.0.ffn_up_exps.weight");
  EXPECT_EQ(up.type, "Q5_1");
  EXPECT_EQ(file.find("blk.0.ffn_gate_inp.weight")->type, "F32");
  const BlockQuantiser quantiser("Q5_1", ScaleRule::kAmax);
  std::vector<std::byte> expected;
  for (int64_t expert = 0; expert < up.shape[0]; ++expert) {
    const QuantisedRows rows =
        quantiser.quantise(values_of(model, 0, weights::kUp, expert), up.shape[1], up.shape[2]);
    expected.insert(expected.end(), rows.codes.begin(), rows.codes.end());
  }
  std::vector<std::byte> bytes(up.bytes);
  file.read(up, 0, bytes);
  EXPECT_EQ(bytes, expected);
}

// Forms mix, shards are parts of one model, and a name with .gguf takes "mxfp4" for GGUF's.
TEST(ConvertLayers, PartsAndMixedForms_AreReadAndVerified) {
  const std::string source = "testdata/quantised/gpt_oss-mxfp4";
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out.gguf";
  const ToolResult result =
      convert(source, out, "mxfp4", {"--keep", "*ffn_down_exps=q8_0", "--shard-size", "20kB"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("MoE layers alone"), std::string::npos) << result.out;
  fs::path first;
  for (const auto& entry : fs::directory_iterator(out)) {
    if (entry.path().filename().string().starts_with("model-00001-of-")) first = entry.path();
  }
  ASSERT_FALSE(first.empty());
  const GgufReader file = GgufReader::open(first);
  EXPECT_GT(file.paths().size(), 1U);
  EXPECT_EQ(file.find("blk.0.ffn_gate_exps.weight")->type, "MXFP4");
  EXPECT_EQ(file.find("blk.0.ffn_down_exps.weight")->type, "Q8_0");
  EXPECT_EQ(run_tool({"verify", first.string()}).exit_code, 0);
  EXPECT_EQ(run_tool({"run", first.string()}).exit_code, 0);
}

TEST(ConvertLayers, WhatGgufDoesNotSay_IsRefusedByName) {
  const ScratchDirectory scratch;
  struct Case {
    const char* model;
    const char* reason;
  };
  for (const auto& [model, reason] :
       {Case{"jetmoe", "no GGUF file is written of this family"},
        Case{"olmoe", "another normalisation of weights"},
        Case{"deepseek_v2", "another score of groups"}, Case{"gpt_oss", "another activation"},
        Case{"laguna", "another bound of the router's logits"},
        Case{"phimoe", "layers of the family have another router there"},
        Case{"ernie4_5_moe", "another guard of the sum of weights"},
        Case{"ernie4_5_moe-biased", "GGUF has no tensor for a weight of layer 1"}}) {
    const ToolResult result = convert(std::string("testdata/models/") + model, scratch / "out",
                                      "q8_0", {"--keep", "*=f32"});
    EXPECT_EQ(result.exit_code, 3) << model;
    EXPECT_NE(result.err.find(reason), std::string::npos) << model << result.err;
  }
  const ToolResult codes = convert("testdata/quantised/gpt_oss-mxfp4", scratch / "out", "q8_0",
                                   {"--keep", "*ffn_down_exps=source"});
  EXPECT_EQ(codes.exit_code, 3);
  EXPECT_NE(codes.err.find("blk.0.ffn_down_exps.weight"), std::string::npos) << codes.err;
  EXPECT_TRUE(fs::is_empty(scratch.path()));
}

}  // namespace
}  // namespace conclave::testing

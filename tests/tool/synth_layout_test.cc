#include "synth/layout.h"

#include "conclave/error.h"
#include "conclave/format.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace conclave::tool {
namespace {

SynthModel make_model(const std::string& model_type) {
  SynthModel model{.model_type = model_type, .num_layers = 2, .spec = {}};
  model.spec.num_experts = 3;
  model.spec.top_k = 2;
  model.spec.hidden_size = 8;
  model.spec.intermediate_size = 4;
  if (model_type == "qwen2_moe") {
    model.spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 6};
  }
  return model;
}

TEST(SynthLayout, SmallShards_HoldEveryTensorOnceWithinTheLimit) {
  constexpr uint64_t kLimit = 200;
  for (const std::string& type : synth_model_types()) {
    std::set<std::string> names;
    size_t tensors = 0;
    for (const SynthShard& shard : plan_shards(make_model(type), kLimit)) {
      EXPECT_TRUE(shard.bytes <= kLimit || shard.tensors.size() == 1);
      for (const SynthTensor& tensor : shard.tensors) names.insert(tensor.name);
      tensors += shard.tensors.size();
    }
    EXPECT_EQ(names.size(), tensors);
    EXPECT_EQ(tensors, 2U * (1 + 3 * 3 + (type == "qwen2_moe" ? 4 : 0)));
  }
}

TEST(SynthLayout, LargeLimit_MakesOneShard) {
  const auto shards = plan_shards(make_model("mixtral"), uint64_t{1} << 40);
  ASSERT_EQ(shards.size(), 1U);
  EXPECT_EQ(shards[0].file_name, "model-00001-of-00001.safetensors");
  EXPECT_EQ(shards[0].tensors[1].name, "model.layers.0.block_sparse_moe.experts.0.w1.weight");
}

TEST(SynthLayout, Index_NamesEveryTensor) {
  const auto shards = plan_shards(make_model("qwen3_moe"), 200);
  const auto index = make_index(shards);
  EXPECT_EQ(index["weight_map"].size(), 20U);
  EXPECT_EQ(index["weight_map"]["model.layers.1.mlp.gate.weight"].get<std::string>().size(),
            std::string("model-00001-of-00001.safetensors").size());
}

TEST(SynthLayout, SharedExpert_FitsOnlyItsFamily) {
  EXPECT_NO_THROW(check_family(make_model("qwen2_moe")));
  SynthModel model = make_model("qwen2_moe");
  model.spec.shared = {};
  EXPECT_THROW(check_family(model), Error);
  model = make_model("qwen2_moe");
  model.model_type = "mixtral";
  EXPECT_THROW(check_family(model), Error);
  model.model_type = "gpt2";
  EXPECT_THROW(check_family(model), Error);
}

// A model of the form that tools offer by this name.
SynthModel with_form(std::string_view name) {
  SynthModel model = make_model("qwen3_moe");
  model.spec.hidden_size = 64;
  model.spec.intermediate_size = 32;
  for (const WeightForm& form : weight_forms()) {
    if (form.name != name) continue;
    model.spec.weight_dtype = form.dtype;
    model.spec.quant = form.quant;
  }
  return model;
}

struct Expected {
  DType dtype;
  std::vector<int64_t> shape;
  uint64_t bytes;
};
void expect_tensors(const SynthModel& model, const std::map<std::string, Expected>& expected) {
  const auto shards = plan_shards(model, uint64_t{1} << 40);
  size_t found = 0;
  for (const SynthTensor& tensor : shards[0].tensors) {
    const std::string prefix = "model.layers.1.mlp.experts.2.down_proj.";
    if (!tensor.name.starts_with(prefix)) continue;
    ++found;
    const auto row = expected.find(tensor.name.substr(prefix.size()));
    ASSERT_NE(row, expected.end()) << tensor.name;
    EXPECT_EQ(tensor.dtype, row->second.dtype) << tensor.name;
    EXPECT_EQ(tensor.shape, row->second.shape) << tensor.name;
    EXPECT_EQ(tensor.bytes, row->second.bytes) << tensor.name;
  }
  EXPECT_EQ(found, expected.size());
}

TEST(SynthLayout, Mxfp4_HasCodesAndExponentsInBytes) {
  const SynthModel model = with_form("mxfp4");
  expect_tensors(model, {{"weight_packed", {DType::kU8, {64, 16}, 1024}},
                         {"weight_scale", {DType::kU8, {64, 1}, 64}}});
  const auto config = make_config(model)["quantization_config"];
  EXPECT_EQ(config["format"], "mxfp4-pack-quantized");
  const auto& weights = config["config_groups"]["group_0"]["weights"];
  EXPECT_EQ(weights["num_bits"], 4);
  EXPECT_EQ(weights["type"], "float");
  EXPECT_EQ(weights["strategy"], "group");
  EXPECT_EQ(weights["group_size"], 32);
}

TEST(SynthLayout, FormThatNoFileHas_IsRefusedAndWhatTheConfigurationStatesIsNot) {
  SynthModel model = with_form("fp8-block");
  model.spec.quant.power_of_two_scales = true;
  EXPECT_EQ(make_config(model)["quantization_config"]["scale_fmt"], "ue8m0");
  model.spec.quant.signed_scales = true;
  EXPECT_THROW(make_config(model), Error);
  model = with_form("int4-group128");
  model.spec.quant.signed_scales = true;
  EXPECT_THROW(plan_shards(model, uint64_t{1} << 40), Error);
}

TEST(SynthLayout, Nvfp4_HasAGlobalScaleThatDivides) {
  const SynthModel model = with_form("nvfp4");
  expect_tensors(model, {{"weight_packed", {DType::kU8, {64, 16}, 1024}},
                         {"weight_scale", {DType::kF8E4M3, {64, 2}, 128}},
                         {"weight_global_scale", {DType::kF32, {1}, 4}}});
  const auto shards = plan_shards(model, uint64_t{1} << 40);
  for (const SynthTensor& tensor : shards[0].tensors) {
    EXPECT_EQ(tensor.is_divisor, tensor.name.ends_with("weight_global_scale")) << tensor.name;
  }
  const auto config = make_config(model)["quantization_config"];
  EXPECT_EQ(config["format"], "nvfp4-pack-quantized");
  EXPECT_EQ(config["config_groups"]["group_0"]["weights"]["strategy"], "tensor_group");
}

TEST(SynthLayout, Int4_HasWordsAndTheirShape) {
  expect_tensors(with_form("int4-group32"), {{"weight_packed", {DType::kI32, {64, 4}, 1024}},
                                             {"weight_shape", {DType::kI64, {2}, 16}},
                                             {"weight_scale", {DType::kF32, {64, 1}, 256}}});
}

TEST(SynthLayout, CodesThatFillNoElement_AreRefused) {
  SynthModel model = with_form("mxfp4");
  model.spec.intermediate_size = 33;
  EXPECT_THROW(static_cast<void>(plan_shards(model, 200)), Error);
}

TEST(SynthLayout, FormWithoutAMethod_IsRefused) {
  EXPECT_THROW(static_cast<void>(plan_shards(with_form("nf4"), 200)), Error);
}

}  // namespace
}  // namespace conclave::tool

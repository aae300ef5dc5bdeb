#include "synth/layout.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <set>

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

}  // namespace
}  // namespace conclave::tool

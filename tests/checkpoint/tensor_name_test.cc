#include "checkpoint/tensor_name.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace conclave::checkpoint {
namespace {

TEST(SplitLayerName, UsualName_GivesTrunkLayerAndRest) {
  const auto name = split_layer_name("model.layers.17.mlp.experts.3.up_proj.weight", "layers");
  ASSERT_TRUE(name);
  EXPECT_EQ(name->trunk, "model.");
  EXPECT_EQ(name->layer, 17);
  EXPECT_TRUE(name->canonical);
  EXPECT_EQ(name->rest, "mlp.experts.3.up_proj.weight");
}

TEST(SplitLayerName, NoTrunk_IsEmpty) {
  const auto name = split_layer_name("layers.0.ffn.gate.weight", "layers");
  ASSERT_TRUE(name);
  EXPECT_EQ(name->trunk, "");
  EXPECT_EQ(name->rest, "ffn.gate.weight");
}

TEST(SplitLayerName, WordInsideComponent_IsNotTheLayerList) {
  EXPECT_FALSE(split_layer_name("model.my_layers.0.x", "layers"));
  EXPECT_FALSE(split_layer_name("model.layersets.0.x", "layers"));
  EXPECT_FALSE(split_layer_name("model.layers.x.0", "layers"));
  EXPECT_FALSE(split_layer_name("model.layers.3", "layers"));
  EXPECT_FALSE(split_layer_name("model.layers.3x.a", "layers"));
  EXPECT_FALSE(split_layer_name("model.layers.-1.a", "layers"));
  EXPECT_FALSE(split_layer_name("", "layers"));
}

TEST(SplitLayerName, OtherListFirst_TakesTheOneWithANumber) {
  const auto name = split_layer_name("layers.extra.layers.2.x", "layers");
  ASSERT_TRUE(name);
  EXPECT_EQ(name->trunk, "layers.extra.");
  EXPECT_EQ(name->layer, 2);
}

TEST(SplitLayerName, LeadingZeros_AreNotCanonical) {
  const auto name = split_layer_name("model.layers.007.x", "layers");
  ASSERT_TRUE(name);
  EXPECT_EQ(name->layer, 7);
  EXPECT_FALSE(name->canonical);
}

TEST(SplitLayerName, HugeNumber_Saturates) {
  const auto name = split_layer_name("model.layers.99999999999999999999999.x", "layers");
  ASSERT_TRUE(name);
  EXPECT_EQ(name->layer, std::numeric_limits<int64_t>::max());
}

TEST(MatchPattern, ExpertPlaceholder_GivesNumber) {
  EXPECT_EQ(match_pattern("mlp.experts.{expert}.up_proj.weight", "mlp.experts.127.up_proj.weight"),
            127);
  EXPECT_EQ(match_pattern("mlp.experts.{expert}.up_proj.weight", "mlp.experts.0.up_proj.weight"),
            0);
}

TEST(MatchPattern, Differences_DoNotMatch) {
  const std::string pattern = "mlp.experts.{expert}.up_proj.weight";
  for (const char* rest : {"mlp.experts.1.down_proj.weight", "mlp.experts..up_proj.weight",
                           "mlp.experts.01.up_proj.weight", "mlp.experts.-1.up_proj.weight",
                           "mlp.experts.1.up_proj.weight2", "xmlp.experts.1.up_proj.weight",
                           "mlp.experts.1x.up_proj.weight", "mlp.experts.", ""}) {
    EXPECT_FALSE(match_pattern(pattern, rest)) << rest;
  }
}

TEST(MatchPattern, WithoutPlaceholder_IsEquality) {
  EXPECT_EQ(match_pattern("mlp.gate.weight", "mlp.gate.weight"), 0);
  EXPECT_FALSE(match_pattern("mlp.gate.weight", "mlp.gate.weigh"));
}

TEST(RenderPattern, Placeholder_IsReplaced) {
  EXPECT_EQ(render_pattern("mlp.experts.{expert}.w1.weight", 12), "mlp.experts.12.w1.weight");
  EXPECT_EQ(render_pattern("mlp.gate.weight", 12), "mlp.gate.weight");
}

TEST(NearestName, Misspelling_FindsIt) {
  const std::vector<std::string> known = {"mlp.gate.weight", "mlp.experts.0.up_proj.weight"};
  EXPECT_EQ(nearest_name("mlp.gaet.weight", known), "mlp.gate.weight");
  EXPECT_EQ(nearest_name("mlp.experts.0.up_prj.weight", known), "mlp.experts.0.up_proj.weight");
  EXPECT_FALSE(nearest_name("zzzzzzzz", known));
}

}  // namespace
}  // namespace conclave::checkpoint

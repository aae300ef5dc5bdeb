// Every model of testdata/models opens: each tensor of a MoE block has a meaning, and each role has
// a tensor.
#include "checkpoint/tiny_model.h"
#include "support/case_name.h"

#include "conclave/checkpoint.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator("testdata/models")) {
    const std::string name = entry.path().filename().string();
    if (entry.is_directory()) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

class GoldenModel : public ::testing::TestWithParam<std::string> {
 protected:
  fs::path directory() const { return fs::path("testdata/models") / GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(Models, GoldenModel, ::testing::ValuesIn(golden_names()),
                         [](const auto& test) { return case_name(test.param); });

TEST_P(GoldenModel, Opened_HasALayerForEachRecordedOne) {
  const Checkpoint checkpoint = Checkpoint::open(directory());
  const SafetensorsFile golden = SafetensorsFile::open(directory() / "golden.safetensors");
  std::set<int64_t> recorded;
  for (const TensorInfo& info : golden.tensors()) {
    recorded.insert(std::stoll(info.name.substr(info.name.find('.') + 1)));
  }
  std::set<int64_t> found;
  for (const CheckpointLayer& layer : checkpoint.layers()) found.insert(layer.index);
  EXPECT_EQ(found, recorded);
}

TEST_P(GoldenModel, Layers_HaveTheRecordedSizes) {
  const Checkpoint checkpoint = Checkpoint::open(directory());
  const SafetensorsFile golden = SafetensorsFile::open(directory() / "golden.safetensors");
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    const std::string start = "layers." + std::to_string(layer.index) + ".f32.";
    const auto columns = [&](const char* name) {
      const TensorInfo* info = golden.find(start + name);
      return info == nullptr ? int64_t{-1} : info->shape.back();
    };
    EXPECT_EQ(columns("router_logits"), num_logits(layer.spec));
    EXPECT_EQ(columns("hidden_states"), layer.spec.hidden_size);
    if (layer.spec.router.name == "hash") {
      EXPECT_NE(golden.find(start + "token_ids"), nullptr);
    }
    EXPECT_EQ(golden.find(start + "residual_input") != nullptr,
              layer.spec.residual.intermediate_size > 0);
    EXPECT_TRUE(layer.support) << layer.support.reason();
  }
}

TEST(GoldenModels, VisionExperts_AreOpenedByOption) {
  const fs::path directory = "testdata/models/ernie4_5_vl_moe";
  const Checkpoint text = Checkpoint::open(directory);
  const Checkpoint vision = Checkpoint::open(directory, {.experts = ExpertSet::kVision});
  const CheckpointLayer& layer = vision.layers()[0];
  EXPECT_EQ(text.layers()[0].spec.intermediate_size, 28);
  EXPECT_EQ(layer.spec.intermediate_size, 20);
  EXPECT_EQ(layer.spec.shared.intermediate_size, 56);
  const SafetensorsFile file = SafetensorsFile::open(directory / "model.safetensors");
  const auto source = vision.layer_source(layer.index);
  const std::string start = layer.prefix + "experts.";
  for (int64_t expert = 0; expert < layer.spec.num_experts; ++expert) {
    const Tensor stored =
        file.load(start + std::to_string(layer.spec.num_experts + expert) + ".up_proj.weight");
    const auto read = read_matrix(*source, weights::kUp, expert);
    ASSERT_EQ(read.size(), stored.size_bytes());
    EXPECT_EQ(std::memcmp(read.data(), stored.view().data, read.size()), 0) << expert;
  }
  const Tensor biases = file.load(layer.prefix + "moe_statics.e_score_correction_bias");
  const auto bias = read_matrix(*source, weights::kSelectionBias, 0);
  EXPECT_EQ(std::memcmp(bias.data(), biases.as<float>() + layer.spec.num_experts, bias.size()), 0);
  const auto error = error_of(
      [] { Checkpoint::open("testdata/models/mixtral", {.experts = ExpertSet::kVision}); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
}

TEST_P(GoldenModel, EveryMatrix_IsRead) {
  const Checkpoint checkpoint = Checkpoint::open(directory());
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    const auto source = checkpoint.layer_source(layer.index);
    EXPECT_EQ(source->describe(weights::kDown).count, layer.spec.num_experts);
    for (const WeightId role : weights::kAll) {
      const WeightInfo info = source->describe(role);
      for (int64_t expert = 0; expert < info.count; ++expert) {
        EXPECT_FALSE(read_matrix(*source, role, expert).empty()) << to_string(role);
      }
    }
  }
}

}  // namespace
}  // namespace conclave::testing

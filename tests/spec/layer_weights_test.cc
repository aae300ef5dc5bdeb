#include "spec/layer_weights.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace conclave {
namespace {

MoeSpec quantised(WeightScale weights, ActivationScale activations = ActivationScale::kNone) {
  MoeSpec spec;
  spec.num_experts = 4;
  spec.top_k = 2;
  spec.hidden_size = 300;
  spec.intermediate_size = 130;
  spec.weight_dtype = DType::kF8E4M3;
  spec.quant = {.weights = weights, .activations = activations};
  return spec;
}

WeightShape shape_of(const MoeSpec& spec, WeightId id) {
  for (const WeightShape& shape : layer_weights(spec)) {
    if (shape.id == id) return shape;
  }
  return {};
}

TEST(LayerWeights, Scales_HaveTheShapeOfTheirForm) {
  const WeightShape tensor =
      shape_of(quantised(WeightScale::kTensor), weights::kGate.with(WeightPlane::kScale));
  EXPECT_EQ(tensor.count, 4);
  EXPECT_EQ(tensor.rows, 1);
  EXPECT_EQ(tensor.cols, 1);
  const WeightShape channel =
      shape_of(quantised(WeightScale::kChannel), weights::kDown.with(WeightPlane::kScale));
  EXPECT_EQ(channel.rows, 300);
  EXPECT_EQ(channel.cols, 1);
  const WeightShape block =
      shape_of(quantised(WeightScale::kBlock), weights::kUp.with(WeightPlane::kScale));
  EXPECT_EQ(block.rows, 2) << "130 rows";
  EXPECT_EQ(block.cols, 3) << "300 columns";
  EXPECT_EQ(block.type, quant::PlaneType::kScale);
  EXPECT_EQ(
      shape_of(quantised(WeightScale::kBlock), weights::kDown.with(WeightPlane::kInputScale)).count,
      0);
  const MoeSpec fixed = quantised(WeightScale::kTensor, ActivationScale::kTensorStatic);
  EXPECT_EQ(shape_of(fixed, weights::kDown.with(WeightPlane::kInputScale)).count, 4);
}

TEST(LayerWeights, VectorsOfTheRouter_CountZeroExpertsWhereTheseAreChosen) {
  MoeSpec spec = quantised(WeightScale::kTensor);
  spec.num_zero_experts = 3;
  spec.router.has_selection_bias = true;
  spec.router.has_expert_scale = true;
  EXPECT_EQ(shape_of(spec, weights::kSelectionBias).cols, 7);
  EXPECT_EQ(shape_of(spec, weights::kExpertScale).cols, 4);
}

TEST(LayerWeights, PlainSharedExperts_HaveNoScales) {
  MoeSpec spec = quantised(WeightScale::kBlock);
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 40};
  EXPECT_EQ(shape_of(spec, weights::kSharedUp.with(WeightPlane::kScale)).count, 1);
  spec.shared.weight_dtype = DType::kBF16;
  EXPECT_EQ(shape_of(spec, weights::kSharedUp.with(WeightPlane::kScale)).count, 0);
  EXPECT_EQ(shape_of(spec, weights::kSharedUp).dtype, DType::kBF16);
}

TEST(LayerWeights, EveryId_IsListedOnce) {
  MoeSpec spec = quantised(WeightScale::kTensor, ActivationScale::kTensorStatic);
  spec.has_bias = true;
  spec.has_output_bias = true;
  spec.shared = {.mode = SharedMode::kSoftmaxMix, .intermediate_size = 40, .has_bias = true};
  spec.latent = {.size = 60, .has_norm = true};
  spec.residual = {.intermediate_size = 20, .weight_dtype = DType::kF16};
  std::set<std::string> names;
  for (const WeightShape& shape : layer_weights(spec)) {
    EXPECT_TRUE(names.insert(to_string(shape.id)).second) << to_string(shape.id);
    EXPECT_GT(shape.count * shape.rows * shape.cols, 0) << to_string(shape.id);
    EXPECT_EQ(shape.is_vector, shape.is_vector && shape.rows == 1) << to_string(shape.id);
  }
  EXPECT_TRUE(names.contains("shared_gate_input_scale"));
  EXPECT_TRUE(names.contains("mix_gate_bias"));
  EXPECT_TRUE(names.contains("residual_down"));
  EXPECT_FALSE(names.contains("residual_down_scale"));
  EXPECT_EQ(shape_of(spec, weights::kGate).cols, 60) << "the width of the latent projection";
  EXPECT_EQ(shape_of(spec, weights::kDown.with(WeightPlane::kBias)).cols, 60);
  EXPECT_TRUE(shape_of(spec, weights::kMixGateBias).is_optional);
}

TEST(LayerWeights, TypesOfPlanes_AreToldApart) {
  const MoeSpec spec = quantised(WeightScale::kBlock);
  EXPECT_TRUE(is_stored_as(shape_of(spec, weights::kUp), DType::kF8E4M3));
  EXPECT_FALSE(is_stored_as(shape_of(spec, weights::kUp), DType::kBF16));
  const WeightShape scale = shape_of(spec, weights::kUp.with(WeightPlane::kScale));
  EXPECT_TRUE(is_stored_as(scale, DType::kF8E8M0));
  EXPECT_FALSE(is_stored_as(scale, DType::kI32));
  EXPECT_TRUE(is_stored_as(shape_of(spec, weights::kRouter), DType::kF16));
  EXPECT_FALSE(is_stored_as(shape_of(spec, weights::kRouter), DType::kF8E8M0));
}

}  // namespace
}  // namespace conclave

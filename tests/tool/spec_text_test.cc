// Tests the description of layers in words.

#include "spec_text.h"

#include <gtest/gtest.h>

namespace conclave::tool {
namespace {

TEST(SharedText, EveryMode_IsTold) {
  EXPECT_EQ(shared_text({}), "-");
  EXPECT_EQ(shared_text({.mode = SharedMode::kAdd, .intermediate_size = 44}), "44");
  EXPECT_EQ(shared_text({.mode = SharedMode::kSigmoidGate, .intermediate_size = 44}), "44 gated");
  EXPECT_EQ(shared_text({.mode = SharedMode::kFusedSlots, .intermediate_size = 8, .count = 2}),
            "2 x 8 slots");
  EXPECT_EQ(shared_mode_name(SharedMode::kSoftmaxMix), "softmax_mix");
  EXPECT_EQ(shared_mode_name(SharedMode::kRouterWeight), "router_weight");
}

TEST(RouterText, GroupsAndBias_AreTold) {
  RouterSpec router;
  EXPECT_EQ(router_text(router), "topk softmax renorm");
  router.score = RouterScore::kSigmoid;
  router.num_groups = 8;
  router.topk_groups = 4;
  router.has_selection_bias = true;
  router.renormalize = Renormalize::kNone;
  EXPECT_EQ(router_text(router), "topk sigmoid 4/8 bias");
}

TEST(WeightsText, WhatGivesCodesAMeaning_IsTold) {
  MoeSpec spec;
  spec.weight_dtype = DType::kI4;
  spec.quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32};
  EXPECT_EQ(weights_text(spec), "I4 block 1x32");
  spec.quant.zeros = WeightZero::kPoint;
  spec.quant.has_column_order = true;
  EXPECT_EQ(weights_text(spec), "I4 block 1x32, zero points, column order");
  spec.quant = {.weights = WeightScale::kChannel,
                .zeros = WeightZero::kOffset,
                .has_global_scale = true,
                .has_column_factors = true};
  EXPECT_EQ(weights_text(spec), "I4 channel, offsets, global scale, column factors");
  spec.quant = {.weights = WeightScale::kChannel,
                .activations = ActivationScale::kGroup,
                .activation_group = 32};
  EXPECT_EQ(weights_text(spec), "I4 channel, rows by 32");
  spec.quant.activation_dtype = DType::kI8;
  EXPECT_EQ(weights_text(spec), "I4 channel, rows by 32 in I8");
  spec.weight_dtype = DType::kI8;
  spec.quant = {.weights = WeightScale::kBlock,
                .block_rows = 1,
                .block_cols = 16,
                .zeros = WeightZero::kOffset,
                .gate_up_codes = {.dtype = DType::kU4, .block_cols = 32},
                .down_codes = {.has_zeros = false}};
  EXPECT_EQ(weights_text(spec), "I8 block 1x16, offsets, gate and up U4 1x32, down without zeros");
}

TEST(PartsText, NothingOrEverything_IsTold) {
  MoeSpec spec;
  EXPECT_EQ(parts_text(spec), "-");
  spec.latent.size = 16;
  spec.residual.intermediate_size = 24;
  spec.num_zero_experts = 2;
  spec.has_bias = true;
  spec.has_output_bias = true;
  spec.weight_on = WeightOn::kInput;
  spec.output_scale = 2.5;
  EXPECT_EQ(parts_text(spec),
            "latent 16, residual 24, 2 zero, bias, out bias, weight on input, scale 2.5");
}

}  // namespace
}  // namespace conclave::tool

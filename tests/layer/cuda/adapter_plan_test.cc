// Which kernels rows with adapters have on an H200, and what they need, as any machine can plan it.
#include "experts/cuda/adapters/adapter_kernel.h"
#include "experts/cuda/factor_planes.h"
#include "layer/coded_specs.h"
#include "layer/cuda/book_workspace.h"
#include "layer/cuda/h200_plan.h"
#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <string>
#include <tuple>

namespace conclave::testing {
namespace {

constexpr int32_t kRank = 16;

MoeSpec channel_spec(DType type) {
  return coded_spec(type, 8, 2, 256, 128, {.weights = WeightScale::kChannel});
}

TEST(CudaAdapterPlan, LayersWithoutRoom_PlanNothing) {
  const CudaPlan without = plan(make_spec(8, 2, 256, 128, DType::kBF16));
  EXPECT_TRUE(without.routed.adapters.empty());
  const CudaPlan with = plan(make_spec(8, 2, 256, 128, DType::kBF16), {.max_adapter_rank = kRank});
  EXPECT_GT(with.summary.workspace_bytes, without.summary.workspace_bytes);
  EXPECT_EQ(with.decode_tokens, without.decode_tokens);
  EXPECT_EQ(with.routed.ladder.size(), without.routed.ladder.size());
}

TEST(CudaAdapterPlan, SixteenBits_TakeTheLaddersArithmeticInOnePass) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const CudaPlan planned =
        plan(make_spec(8, 2, 1024, 512, dtype), {.max_tokens = 8192, .max_adapter_rank = kRank});
    ASSERT_EQ(planned.routed.adapters.size(), planned.routed.ladder.size());
    for (size_t i = 0; i < planned.routed.adapters.size(); ++i) {
      const AdapterRung& rung = planned.routed.adapters[i];
      EXPECT_TRUE(rung.in_one_pass);
      EXPECT_EQ(rung.row->name, "cuda.stream_sm90");
      EXPECT_EQ(rung.last_tokens, planned.routed.ladder[i].last_tokens);
      EXPECT_LE(rung.tile.tokens, planned.routed.ladder[i].tile.tokens);
    }
  }
}

// The kernels of a part's adapters, by the arithmetic of its ladder.
void expect_rows(const CudaPlan& planned, bool in_one_pass, std::string_view name) {
  ASSERT_FALSE(planned.routed.adapters.empty());
  for (const AdapterRung& rung : planned.routed.adapters) {
    EXPECT_EQ(rung.in_one_pass, in_one_pass);
    EXPECT_EQ(rung.row->name, name);
  }
}

TEST(CudaAdapterPlan, CodesAndFloats_TakeTheArithmeticOfTheirLadder) {
  const LayerOptions options{.max_tokens = 16, .max_adapter_rank = kRank};
  expect_rows(plan(channel_spec(DType::kF8E4M3), options), true, "cuda.stream_codes_sm90");
  expect_rows(plan(make_spec(8, 2, 256, 128, DType::kF32), options), true, "cuda.reference");
  MoeSpec bytes = channel_spec(DType::kF8E4M3);
  bytes.quant.activations = ActivationScale::kToken;
  expect_rows(plan(bytes, options), true, "cuda.stream_fp8_sm90");
  bytes = channel_spec(DType::kI8);
  bytes.quant.activations = ActivationScale::kToken;
  expect_rows(plan(bytes, options), true, "cuda.stream_int8_sm90");
}

// GGUF's K-quants keep their steps: kernels of rows with adapters read them as the ladder's do.
TEST(CudaAdapterPlan, NumbersInSteps_TakeTheArithmeticOfTheirLadder) {
  QuantSpec q4_k{.weights = WeightScale::kBlock,
                 .block_rows = 1,
                 .block_cols = 32,
                 .scale_values = ScaleValues::kSteps,
                 .zeros = WeightZero::kOffset,
                 .zero_values = ScaleValues::kSteps};
  QuantSpec q6_k{.weights = WeightScale::kBlock,
                 .block_rows = 1,
                 .block_cols = 16,
                 .scale_values = ScaleValues::kSteps};
  for (const auto& [dtype, quant, form] :
       {std::tuple{DType::kU4, q4_k, experts::FactorForm::kSteps},
        std::tuple{DType::kI8, q4_k, experts::FactorForm::kSteps},
        std::tuple{DType::kI8, q6_k, experts::FactorForm::kScaleSteps}}) {
    const CudaPlan planned = plan(coded_spec(dtype, 8, 2, 2048, 768, quant),
                                  {.max_tokens = 16, .max_adapter_rank = kRank});
    EXPECT_EQ(experts::factor_form(planned.routed.problem), form);
    expect_rows(planned, true, "cuda.stream_codes_sm90");
  }
}

// Few rows an expert of a large layer have tiles of four warpgroups, where codes lie in the order
// of lanes.
TEST(CudaAdapterPlan, CodesOfLanes_TakeTheLaddersWeightRows) {
  const auto in_groups = [](int64_t columns, WeightZero zeros = WeightZero::kNone) {
    return QuantSpec{
        .weights = WeightScale::kBlock, .block_rows = 1, .block_cols = columns, .zeros = zeros};
  };
  QuantSpec mxfp4 = in_groups(32);
  mxfp4.scale_values = ScaleValues::kPowerOfTwo;
  for (const auto& [dtype, quant] :
       {std::tuple{DType::kI4, in_groups(128)},
        std::tuple{DType::kU4, in_groups(32, WeightZero::kOffset)},
        std::tuple{DType::kNF4, in_groups(64)}, std::tuple{DType::kF4, mxfp4}}) {
    SCOPED_TRACE(std::string(to_string(dtype)));
    const CudaPlan planned = plan(coded_spec(dtype, 128, 8, 2048, 768, quant),
                                  {.max_tokens = 64, .max_adapter_rank = kRank});
    ASSERT_EQ(planned.routed.adapters.size(), planned.routed.ladder.size());
    int wide = 0;
    for (size_t i = 0; i < planned.routed.adapters.size(); ++i) {
      const experts::DeviceTile& tile = planned.routed.adapters[i].tile;
      EXPECT_EQ(tile.tokens, planned.routed.ladder[i].tile.tokens);
      EXPECT_EQ(tile.features, planned.routed.ladder[i].tile.features);
      wide += tile.features == 256 ? 1 : 0;
    }
    EXPECT_GT(wide, 0);
  }
}

TEST(CudaAdapterPlan, OtherArithmetics_AreComputedBehindTheLadders) {
  MoeSpec factors = channel_spec(DType::kI8);
  factors.quant.has_column_factors = true;
  expect_rows(plan(factors, {.max_tokens = 16, .max_adapter_rank = kRank}), false,
              "cuda.reference");
  const CudaPlan many =
      plan(channel_spec(DType::kI8),
           {.max_tokens = 16, .kernel = "cuda.tile_codes_sm90", .max_adapter_rank = kRank});
  expect_rows(many, false, "cuda.stream_codes_sm90");
}

// Kernels add rows up for offsets where codes lie in order, and multiply these by ones where not;
// those of adapters do the same, so that one pass serves both.
TEST(CudaAdapterPlan, Offsets_TakeTheArithmeticOfTheirLadder) {
  const LayerOptions options{.max_tokens = 16, .max_adapter_rank = kRank};
  const auto groups_of = [](int64_t columns, WeightZero zeros) {
    return QuantSpec{
        .weights = WeightScale::kBlock, .block_rows = 1, .block_cols = columns, .zeros = zeros};
  };
  const auto plan_of = [&](DType type, const QuantSpec& quant) {
    return plan(coded_spec(type, 8, 2, 256, 128, quant), options);
  };
  for (const DType type : {DType::kI4, DType::kU4}) {
    expect_rows(plan_of(type, groups_of(32, WeightZero::kOffset)), true, "cuda.stream_codes_sm90");
    expect_rows(plan_of(type, groups_of(16, WeightZero::kOffset)), true, "cuda.stream_codes_sm90");
    expect_rows(plan_of(type, groups_of(32, WeightZero::kPoint)), true, "cuda.stream_codes_sm90");
  }
  expect_rows(plan_of(DType::kI4, groups_of(32, WeightZero::kNone)), true,
              "cuda.stream_codes_sm90");
}

TEST(CudaAdapterPlan, OrdersOfColumns_TakeTheArithmeticOfTheirLadder) {
  QuantSpec quant{.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32};
  quant.has_column_order = true;
  const MoeSpec spec = coded_spec(DType::kI4, 4, 2, 128, 64, quant);
  expect_rows(plan(spec, {.max_tokens = 16, .max_adapter_rank = kRank}), true,
              "cuda.stream_codes_sm90");
}

// Every call's workspace holds what its rows need: terms of gate, up and down, and where they are.
TEST(CudaAdapterPlan, Workspace_GrowsWithTheRank) {
  const MoeSpec spec = make_spec(8, 2, 256, 128, DType::kBF16);
  const auto bytes = [&](int32_t rank) {
    return workspace_bytes(plan(spec, {.max_tokens = 512, .max_adapter_rank = rank}), 512);
  };
  const size_t slots = 512 * 2;
  EXPECT_GE(bytes(512) - bytes(8), slots * 3 * (512 - 8) * sizeof(float));
}

}  // namespace
}  // namespace conclave::testing

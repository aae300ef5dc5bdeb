// Tests how the decode kernel divides a layer; these are plain numbers, on any machine.
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/sm90/decode/decode_row.h"
#include "experts/cuda/sm90/decode/plan.h"
#include "experts/cuda/sm90/decode/tables.h"
#include "support/cuda/cuda_problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace conclave::experts {
namespace {

constexpr int64_t kSharedBytes = int64_t{227} << 10;

struct Sizes {
  int64_t experts, top_k, hidden, intermediate;
  DType dtype;
};

ExpertsProblem problem_of(const Sizes& sizes) {
  ExpertsProblem problem{.num_local_experts = sizes.experts,
                         .hidden_size = sizes.hidden,
                         .intermediate_size = sizes.intermediate,
                         .top_k = sizes.top_k,
                         .max_tokens = 8,
                         .weight_dtype = sizes.dtype};
  if (sizes.dtype == DType::kF8E4M3) problem.quant = testing::fp8_block_quant();
  if (sizes.dtype == DType::kI8) problem.quant = {.weights = WeightScale::kChannel};
  if (bit_size(sizes.dtype) == 4) {
    problem.quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 128};
  }
  problem.target = cuda::DeviceInfo{.name = "NVIDIA H200",
                                    .capability = {9, 0},
                                    .multiprocessors = 132,
                                    .shared_bytes_per_block = kSharedBytes};
  return problem;
}

const std::vector<Sizes> kModels = {
    {8, 2, 4096, 14336, DType::kBF16},    {128, 8, 2048, 768, DType::kBF16},
    {64, 8, 2048, 1024, DType::kF16},     {32, 4, 2880, 2880, DType::kBF16},
    {128, 8, 4096, 1536, DType::kF8E4M3}, {256, 8, 7168, 2048, DType::kF8E4M3},
    {8, 2, 4096, 14336, DType::kI4},      {128, 8, 2048, 768, DType::kNF4},
    {32, 4, 2880, 2880, DType::kF4},      {64, 8, 2048, 1024, DType::kI8}};
// No box, tile or pass divides these sizes.
const std::vector<Sizes> kOdd = {{6, 3, 1000, 136, DType::kBF16}, {60, 5, 520, 72, DType::kF8E4M3},
                                 {10, 1, 8, 8, DType::kF16},      {3, 3, 136, 1000, DType::kBF16},
                                 {6, 3, 131, 67, DType::kI4},     {5, 2, 712, 1160, DType::kI8}};

std::vector<Sizes> all_sizes() {
  std::vector<Sizes> all = kModels;
  all.insert(all.end(), kOdd.begin(), kOdd.end());
  return all;
}

std::string text_of(const Sizes& s) {
  return "E " + std::to_string(s.experts) + ", k " + std::to_string(s.top_k) + ", H " +
         std::to_string(s.hidden) + ", I " + std::to_string(s.intermediate);
}

TEST(DecodePlan, Qwen3_HasTheseNumbers) {
  const DecodePlan plan = decode_plan(problem_of(kModels[1]));
  EXPECT_EQ(plan.blocks, 132);
  EXPECT_EQ(plan.up_boxes, 32);    // 2048 bf16, 64 per box
  EXPECT_EQ(plan.down_boxes, 12);  // 768, 64 per box
  EXPECT_EQ(plan.tile_features, 8);
  EXPECT_EQ(plan.feature_tiles, 96);
  EXPECT_EQ(plan.passes, 1);
  EXPECT_EQ(plan.pass_rows, 16);  // 2048 columns over 132 blocks
  EXPECT_EQ(plan.k_slices, 1);
  EXPECT_EQ(plan.up_copy_boxes, kDecodeUpStageBoxes);
  EXPECT_EQ(plan.max_tokens, kDecodeMaxTokens);
}

// Two tables of values leave room for the rows of fewer tokens, more than the plan chooses it for.
TEST(DecodePlan, EveryModel_ServesEightTokens) {
  for (const Sizes& sizes : kModels) {
    EXPECT_TRUE(decode_supports(problem_of(sizes))) << text_of(sizes);
    const int32_t least = sizes.dtype == DType::kNF4 ? 4 : kDecodeMaxTokens;
    EXPECT_GE(decode_plan(problem_of(sizes)).max_tokens, least) << text_of(sizes);
  }
}

TEST(DecodePlan, EverySize_IsCovered) {
  for (const Sizes& sizes : all_sizes()) {
    SCOPED_TRACE(text_of(sizes));
    const DecodePlan plan = decode_plan(problem_of(sizes));
    const int64_t box = kDecodeBoxBytes * 8 / plan.weight_bits;
    EXPECT_GE(plan.up_boxes * box, sizes.hidden);
    EXPECT_LT((plan.up_boxes - 1) * box, sizes.hidden);
    EXPECT_GE(plan.down_boxes * box, sizes.intermediate);
    EXPECT_GE(plan.feature_tiles * plan.tile_features, sizes.intermediate);
    EXPECT_GE(int64_t{plan.blocks} * plan.passes * plan.pass_rows, sizes.hidden);
    EXPECT_GE(plan.intermediate_stride, sizes.intermediate);
    EXPECT_LE(plan.pass_rows, kDecodeMaxPassRows);
    EXPECT_EQ(plan.pass_rows % 8, 0);
    EXPECT_GE(plan.k_slices * plan.slice_boxes, plan.down_boxes);
    EXPECT_LT((plan.k_slices - 1) * plan.slice_boxes, plan.down_boxes);
    EXPECT_GE(plan.down_stage_boxes, 1);
    EXPECT_LE(plan.down_stage_boxes * plan.down_box_bytes, kDecodeStageBytes);
    EXPECT_GE(plan.row_box_bytes, plan.box_columns);
    // A copy of several boxes cannot tell where a row ends.
    EXPECT_TRUE(plan.up_copy_boxes == 1 || sizes.hidden % box == 0);
    EXPECT_TRUE(plan.down_copy_boxes == 1 || sizes.intermediate % box == 0);
  }
}

TEST(DecodePlan, SharedMemory_FitsForEveryNumberOfTokens) {
  for (const Sizes& sizes : all_sizes()) {
    const DecodePlan plan = decode_plan(problem_of(sizes));
    int32_t stages = kDecodeTileSlots;
    for (int32_t tokens = 1; tokens <= plan.max_tokens; ++tokens) {
      SCOPED_TRACE(text_of(sizes) + ", T " + std::to_string(tokens));
      const DecodeShared shared = decode_shared(plan, tokens, kSharedBytes);
      EXPECT_LE(shared.total, kSharedBytes);
      EXPECT_GE(shared.stages, 3);
      EXPECT_LE(shared.stages, stages);  // more tokens never leave more for weights
      stages = shared.stages;
      // A published tile stays until the last warp has read it.
      EXPECT_LT(shared.stages + kDecodeTileBuffers + kDecodeTilesAhead, kDecodeTileSlots);
      const std::vector<uint32_t> begins = {
          static_cast<uint32_t>(shared.stages * kDecodeStageBytes),
          shared.barriers,
          shared.stage_scales,
          shared.factors,
          shared.values,
          shared.tables,
          shared.tiles,
          shared.row_scales,
          shared.rows,
          shared.total};
      EXPECT_TRUE(std::is_sorted(begins.begin(), begins.end()));
      EXPECT_GE(shared.tiles - shared.tables, sizeof(DecodeTables));
      EXPECT_GE(shared.total - shared.rows, static_cast<uint32_t>(tokens) * shared.up_pitch);
      EXPECT_GE(shared.total - shared.rows,
                static_cast<uint32_t>(shared.down_rows) * shared.down_pitch);
      EXPECT_GE(shared.down_rows, tokens);  // at least one slice of each token's row
      EXPECT_GE(shared.up_pitch, static_cast<uint32_t>(plan.up_boxes * plan.row_box_bytes));
      EXPECT_GE(shared.tables - shared.values, static_cast<uint32_t>(plan.value_bytes));
      EXPECT_GE(shared.values - shared.factors,
                static_cast<uint32_t>(shared.stages * plan.factor_bytes));
      // TMA writes factors to multiples of 128 bytes.
      EXPECT_EQ(shared.factors % 128, 0);
      EXPECT_EQ(plan.factor_bytes % 128, 0);
      EXPECT_EQ(plan.second_factor % 128, 0);
    }
  }
}

struct StepForm {
  DType dtype;
  int64_t columns;
  bool has_offsets = false;
  std::optional<DType> known = std::nullopt;
};

// Q4_K, Q6_K, Q5_K, Q3_K and Q2_K have such steps.
TEST(DecodePlan, StepsAndTheirUnits_HaveRoomInEveryStage) {
  for (const auto& [dtype, columns, has_offsets, known] :
       {StepForm{DType::kU4, 32, true}, StepForm{DType::kI8, 16}, StepForm{DType::kI8, 32, true},
        StepForm{DType::kI4, 16}, StepForm{DType::kI4, 16, true, DType::kU2}}) {
    for (const Sizes& sizes : {Sizes{128, 8, 2048, 768, dtype}, Sizes{8, 2, 4096, 14336, dtype},
                               Sizes{5, 2, 712, 1160, dtype}}) {
      SCOPED_TRACE(text_of(sizes));
      ExpertsProblem wide = problem_of(sizes);
      wide.quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = columns};
      if (has_offsets) wide.quant.zeros = WeightZero::kOffset;
      ExpertsProblem narrow = wide;
      narrow.quant.scale_values = ScaleValues::kSteps;
      if (has_offsets) narrow.quant.zero_values = ScaleValues::kSteps;
      narrow.quant.gate_up_codes.dtype = narrow.quant.down_codes.dtype = known;
      const FactorForm form = factor_form(narrow);
      ASSERT_TRUE(has_steps(form));
      const DecodePlan plan = decode_plan(narrow);
      const DecodePlan of_floats = decode_plan(wide);
      const auto expect_room = [&](int64_t rows, const DecodeFactors& factors, int64_t boxes) {
        const int64_t units = boxes * units_of_box(narrow);
        EXPECT_EQ(factors.stage_groups, units * groups_of_unit(narrow));
        EXPECT_GE(plan.second_factor,
                  rows * step_words(form, factors.stage_groups) * bytes_of_step_word(form));
        EXPECT_GE(plan.factor_bytes - plan.second_factor, rows * units * bytes_of_step_unit(form));
      };
      expect_room(16, plan.up_factors, kDecodeUpStageBoxes);
      expect_room(plan.pass_rows, plan.down_factors, plan.down_stage_boxes);
      EXPECT_EQ(plan.second_factor % 128, 0);
      EXPECT_EQ(plan.factor_bytes % 128, 0);
      EXPECT_LT(plan.factor_bytes, of_floats.factor_bytes);
      EXPECT_GE(plan.max_tokens, of_floats.max_tokens);
      for (int32_t tokens = 1; tokens <= of_floats.max_tokens; ++tokens) {
        const DecodeShared shared = decode_shared(plan, tokens, kSharedBytes);
        EXPECT_LE(shared.total, kSharedBytes);
        EXPECT_GE(shared.stages, decode_shared(of_floats, tokens, kSharedBytes).stages);
      }
    }
  }
}

TEST(DecodePlan, ManyChoices_LowerTheTokens) {
  // There are at most 128 pairs.
  EXPECT_EQ(decode_plan(problem_of({64, 16, 2048, 768, DType::kBF16})).max_tokens, 8);
  EXPECT_EQ(decode_plan(problem_of({64, 24, 2048, 768, DType::kBF16})).max_tokens, 5);
  EXPECT_EQ(decode_plan(problem_of({128, 128, 2048, 768, DType::kBF16})).max_tokens, 1);
}

TEST(DecodePlan, WideRows_LowerTheTokensThenRefuse) {
  const ExpertsProblem wide = problem_of({8, 2, 32768, 1024, DType::kBF16});
  const DecodePlan plan = decode_plan(wide);
  EXPECT_GE(plan.max_tokens, 1);
  EXPECT_LT(plan.max_tokens, kDecodeMaxTokens);
  EXPECT_EQ(decode_shared(plan, plan.max_tokens + 1, kSharedBytes).stages, 0);
  const Support support = decode_supports(problem_of({8, 2, 131072, 1024, DType::kBF16}));
  EXPECT_FALSE(support);
  EXPECT_NE(support.reason().find("shared memory"), std::string::npos) << support.reason();
}

TEST(DecodeSupport, WhatItCannotDo_IsNamed) {
  const auto reason = [](const ExpertsProblem& problem) {
    const Support support = decode_supports(problem);
    EXPECT_FALSE(support);
    return std::string(support.reason());
  };
  ExpertsProblem problem = problem_of(kModels[1]);
  std::get<cuda::DeviceInfo>(problem.target).capability = {8, 0};
  EXPECT_NE(reason(problem).find("9.0"), std::string::npos);
  problem = problem_of(kModels[1]);
  problem.weight_dtype = DType::kF32;
  EXPECT_NE(reason(problem).find("float32"), std::string::npos);
  problem = problem_of(kModels[1]);
  problem.num_local_experts = 0;
  EXPECT_NE(reason(problem).find("local experts"), std::string::npos);
  problem = problem_of(kModels[1]);
  problem.top_k = 129;
  EXPECT_NE(reason(problem).find("128 experts"), std::string::npos);
  problem = problem_of(kModels[1]);
  problem.intermediate_size = (int64_t{1} << 24) + 8;
  EXPECT_NE(reason(problem).find("2^24"), std::string::npos);
}

// A stage brings the factors of all its boxes, also where it begins within a group.
TEST(DecodePlan, FactorsOfCodes_ComeWithTheirStage) {
  const auto factors = [](DType dtype, int64_t columns, int64_t hidden = 2048) {
    ExpertsProblem problem = problem_of({16, 4, hidden, 768, dtype});
    problem.quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = columns};
    return decode_plan(problem).up_factors;
  };
  const auto expect = [](const DecodeFactors& found, int groups, int steps, int stage_groups) {
    EXPECT_EQ(found.groups, groups);
    EXPECT_EQ(found.steps, steps);
    EXPECT_EQ(found.stage_groups, stage_groups);
  };
  expect(factors(DType::kI4, 16), 16, 1, 128);
  expect(factors(DType::kI4, 32), 8, 2, 64);
  expect(factors(DType::kI4, 128), 2, 8, 16);
  expect(factors(DType::kI4, 256), 1, 16, 8);
  expect(factors(DType::kI4, 512), 1, 16, 5);
  expect(factors(DType::kI4, 2048), 1, 16, 1);
  expect(factors(DType::kI8, 32), 4, 2, 32);
  expect(factors(DType::kI8, 128), 1, 8, 8);
}

// Whole numbers of 4 bits in their order, and those of a byte without offsets, take no table, which
// leaves room for weights.
TEST(DecodePlan, WholeNumbers_TakeNoTable) {
  const auto plan = [](DType dtype, WeightZero zeros = WeightZero::kNone, int64_t columns = 32) {
    ExpertsProblem problem = problem_of({16, 4, 2048, 768, dtype});
    problem.quant = {
        .weights = WeightScale::kBlock, .block_rows = 1, .block_cols = columns, .zeros = zeros};
    return decode_plan(problem);
  };
  constexpr int32_t kTable = 256 * 32 * 4;
  for (const DType dtype : {DType::kI4, DType::kU4}) {
    EXPECT_EQ(plan(dtype).value_bytes, 0);
    EXPECT_EQ(plan(dtype, WeightZero::kPoint).value_bytes, 0);
    EXPECT_EQ(plan(dtype, WeightZero::kOffset).value_bytes, 0);
    EXPECT_TRUE(plan(dtype, WeightZero::kOffset).has_lanes);
    EXPECT_EQ(plan(dtype, WeightZero::kOffset, 16).value_bytes, kTable) << "two groups a word";
    EXPECT_FALSE(plan(dtype, WeightZero::kOffset, 16).has_lanes);
  }
  EXPECT_EQ(plan(DType::kF4).value_bytes, kTable);
  EXPECT_TRUE(plan(DType::kF4).has_lanes);
  EXPECT_EQ(plan(DType::kNF4, WeightZero::kNone, 64).value_bytes, 2 * kTable) << "two terms";
  EXPECT_EQ(plan(DType::kNF4).value_bytes, kTable / 16) << "both terms of a code, as stored";
  EXPECT_EQ(plan(DType::kI8).value_bytes, 0);
  EXPECT_EQ(plan(DType::kI8, WeightZero::kPoint).value_bytes, 0);
  EXPECT_EQ(plan(DType::kI8, WeightZero::kOffset).value_bytes, kTable);
  EXPECT_EQ(plan(DType::kF8E5M2).value_bytes, kTable);
  EXPECT_EQ(plan(DType::kI4).factor_bytes, plan(DType::kF4).factor_bytes);
}

TEST(DecodeSupport, CodesItCannotUse_AreNamed) {
  ExpertsProblem problem = problem_of({128, 8, 2048, 768, DType::kI4});
  ASSERT_TRUE(decode_supports(problem));
  problem.quant.activations = ActivationScale::kToken;
  EXPECT_NE(decode_supports(problem).reason().find("rows as they are"), std::string::npos);
  problem.quant.activations = ActivationScale::kNone;
  problem.quant.has_column_factors = true;
  EXPECT_NE(decode_supports(problem).reason().find("factors"), std::string::npos);
  problem.quant.has_column_factors = false;
  problem.quant.block_cols = 8;
  EXPECT_NE(decode_supports(problem).reason().find("16 columns"), std::string::npos);
}

// The kernel multiplies bytes of e4m3 and whole numbers, beside rows of the same type.
TEST(DecodeSupport, RowsOfAnotherFloat_BecomeNoCodes) {
  const auto makes_codes = [](DType weights, DType rows) {
    ExpertsProblem problem = problem_of({128, 8, 2048, 768, weights});
    problem.quant = {.weights = WeightScale::kChannel,
                     .activations = ActivationScale::kToken,
                     .activation_dtype = rows};
    EXPECT_EQ(static_cast<bool>(decode_supports(problem)), decode_plan(problem).makes_codes);
    return decode_plan(problem).makes_codes;
  };
  EXPECT_TRUE(makes_codes(DType::kF8E4M3, DType::kF8E4M3));
  EXPECT_FALSE(makes_codes(DType::kF8E4M3, DType::kF8E5M2));
  EXPECT_FALSE(makes_codes(DType::kF8E5M2, DType::kF8E4M3));
  EXPECT_FALSE(makes_codes(DType::kF8E5M2, DType::kF8E5M2));
}

TEST(DecodeSupport, Int8RowsByToken_BecomeCodes) {
  ExpertsProblem problem = problem_of({128, 8, 2048, 768, DType::kI8});
  EXPECT_FALSE(decode_plan(problem).makes_codes);
  problem.quant.activations = ActivationScale::kToken;
  ASSERT_TRUE(decode_supports(problem));
  EXPECT_TRUE(decode_plan(problem).makes_codes);
  problem.quant.activations = ActivationScale::kTensorStatic;
  EXPECT_NE(decode_supports(problem).reason().find("rows as they are"), std::string::npos);
}

TEST(DecodeSupport, ScalesItCannotUse_AreNamed) {
  ExpertsProblem problem = problem_of(kModels[4]);
  ASSERT_TRUE(decode_supports(problem));
  problem.quant.block_cols = 64;
  EXPECT_NE(decode_supports(problem).reason().find("128x128"), std::string::npos);
  problem = problem_of(kModels[4]);
  problem.quant.activations = ActivationScale::kToken;
  EXPECT_NE(decode_supports(problem).reason().find("128 activations"), std::string::npos);
  problem.quant.weights = WeightScale::kChannel;
  EXPECT_TRUE(decode_supports(problem));
  problem.quant.activations = ActivationScale::kGroup;
  EXPECT_NE(decode_supports(problem).reason().find("row"), std::string::npos);
  problem.quant.weights = WeightScale::kNone;
  EXPECT_NE(decode_supports(problem).reason().find("takes weights with scales"), std::string::npos);
}

}  // namespace
}  // namespace conclave::experts

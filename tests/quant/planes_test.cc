#include "quant/planes.h"

#include <gtest/gtest.h>

#include <vector>

namespace conclave::quant {
namespace {

constexpr int64_t kRows = 300;
constexpr int64_t kCols = 130;

QuantSpec in_blocks(int64_t rows, int64_t cols) {
  return {.weights = WeightScale::kBlock, .block_rows = rows, .block_cols = cols};
}

// The forms whose planes are cut below.
std::vector<QuantSpec> forms() {
  return {{.weights = WeightScale::kTensor, .activations = ActivationScale::kTensorStatic},
          {.weights = WeightScale::kChannel},
          in_blocks(128, 128),
          in_blocks(1, 32),
          in_blocks(7, 48),
          in_blocks(512, 512)};
}

TEST(Planes, PlainMatrices_HaveOnlyTheirValues) {
  const std::vector<PlaneShape> planes = planes_of(DType::kBF16, {}, kRows, kCols);
  ASSERT_EQ(planes.size(), 1U);
  EXPECT_EQ(planes[0].plane, WeightPlane::kWeights);
  EXPECT_EQ(planes[0].rows, kRows);
  EXPECT_EQ(planes[0].cols, kCols);
}

TEST(Planes, InputScales_ExistForStaticStepsOnly) {
  const QuantSpec fixed = forms().front();
  ASSERT_EQ(planes_of(DType::kF8E4M3, fixed, kRows, kCols).size(), 3U);
  const PlaneShape step = plane_of(WeightPlane::kInputScale, DType::kF8E4M3, fixed, kRows, kCols);
  EXPECT_EQ(step.rows * step.cols, 1);
  EXPECT_TRUE(step.is_single);
  EXPECT_EQ(planes_of(DType::kI4, in_blocks(1, 32), kRows, kCols).size(), 2U);
}

TEST(Planes, ZerosAreAsScales_GlobalScalesAreOneNumber_OrdersAndFactorsARow) {
  QuantSpec quant = in_blocks(1, 32);
  quant.zeros = WeightZero::kPoint;
  quant.has_global_scale = true;
  quant.has_column_order = quant.has_column_factors = true;
  EXPECT_EQ(planes_of(DType::kI4, quant, kRows, kCols).size(), 6U);
  const PlaneShape scale = plane_of(WeightPlane::kScale, DType::kI4, quant, kRows, kCols);
  const PlaneShape zero = plane_of(WeightPlane::kZero, DType::kI4, quant, kRows, kCols);
  EXPECT_EQ(zero.rows, scale.rows);
  EXPECT_EQ(zero.cols, scale.cols);
  EXPECT_EQ(zero.type, PlaneType::kFloat);
  const PlaneShape global = plane_of(WeightPlane::kGlobalScale, DType::kI4, quant, kRows, kCols);
  EXPECT_EQ(global.rows * global.cols, 1);
  EXPECT_TRUE(global.is_single);
  const PlaneShape order = plane_of(WeightPlane::kColumnOrder, DType::kI4, quant, kRows, kCols);
  EXPECT_EQ(order.rows, 1);
  EXPECT_EQ(order.cols, kCols);
  EXPECT_EQ(order.type, PlaneType::kIndex);
  // A block's columns have their entries, whichever its rows.
  const PlaneSlice part = slice(order, {7, 20, 33, 87});
  EXPECT_EQ(part.block.row_begin, 0);
  EXPECT_EQ(part.block.row_end, 1);
  EXPECT_EQ(part.block.col_begin, 33);
  EXPECT_EQ(part.block.col_end, 87);
  const PlaneShape factor = plane_of(WeightPlane::kColumnFactor, DType::kI4, quant, kRows, kCols);
  EXPECT_EQ(factor.rows, 1);
  EXPECT_EQ(factor.cols, kCols);
  EXPECT_EQ(factor.type, PlaneType::kFloat);
  EXPECT_TRUE(factor.is_optional);
  EXPECT_EQ(slice(factor, {7, 20, 33, 87}).block.col_begin, 33);
}

// Every element of a block finds its scale through the slice, wherever the block begins and ends.
TEST(Planes, SliceOfAnyBlock_HoldsTheScaleOfEveryElement) {
  for (const QuantSpec& form : forms()) {
    const PlaneShape plane = plane_of(WeightPlane::kScale, DType::kI8, form, kRows, kCols);
    for (const WeightBlock& block :
         {WeightBlock{0, kRows, 0, kCols}, WeightBlock{0, kRows, 43, 87}, WeightBlock{5, 6, 31, 32},
          WeightBlock{127, 129, 127, 130}, WeightBlock{128, 256, 32, 64},
          WeightBlock{200, kRows, 129, 130}}) {
      const PlaneSlice part = slice(plane, block);
      EXPECT_GE(part.block.row_begin, 0);
      EXPECT_LE(part.block.row_end, plane.rows);
      EXPECT_LE(part.block.col_end, plane.cols);
      for (int64_t row = block.row_begin; row < block.row_end; ++row) {
        const int64_t found =
            part.block.row_begin + (part.skipped_rows + row - block.row_begin) / plane.block_rows;
        ASSERT_EQ(found, row / plane.block_rows);
        ASSERT_LT(found, part.block.row_end);
      }
      for (int64_t col = block.col_begin; col < block.col_end; ++col) {
        const int64_t found =
            part.block.col_begin + (part.skipped_cols + col - block.col_begin) / plane.block_cols;
        ASSERT_EQ(found, col / plane.block_cols);
        ASSERT_LT(found, part.block.col_end);
      }
    }
  }
}

TEST(Planes, SliceOfABias_FollowsTheRows) {
  const PlaneSlice part = slice(bias_of(kRows), {17, 40, 3, 9});
  EXPECT_EQ(part.block.row_begin, 0);
  EXPECT_EQ(part.block.row_end, 1);
  EXPECT_EQ(part.block.col_begin, 17);
  EXPECT_EQ(part.block.col_end, 40);
}

}  // namespace
}  // namespace conclave::quant

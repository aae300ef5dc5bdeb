// Which rows of codes a GPU makes.
#include "quant/gpu_rows.h"

#include "conclave/format.h"

#include <gtest/gtest.h>

namespace conclave {
namespace {

TEST(GpuRowsSupport, OtherWidthsAndTypes_AreRefusedWithAReason) {
  QuantSpec quant{.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
  EXPECT_TRUE(gpu_rows_support(DType::kI4, quant));
  quant.activation_group = 32;
  const Support support = gpu_rows_support(DType::kI4, quant);
  ASSERT_FALSE(support);
  EXPECT_EQ(
      support.reason(),
      "takes rows in groups of 128 columns; found 32; with_plain_rows leaves rows as they are");
  quant.activation_group = 128;
  quant.activation_dtype = DType::kI8;
  EXPECT_TRUE(gpu_rows_support(DType::kI4, quant));
  EXPECT_EQ(gpu_rows_support(DType::kF4, quant).reason(),
            "takes rows in F8_E4M3 beside weights of F4; found I8; with_plain_rows leaves rows as "
            "they are");
}

TEST(GpuRowsSupport, RowsWhoseGroupsHaveScalesOfFewBits_AreTakenAsValues) {
  QuantSpec quant{.weights = WeightScale::kBlock,
                  .block_rows = 1,
                  .block_cols = 32,
                  .activations = ActivationScale::kGroup,
                  .activation_group = 32,
                  .activation_dtype = DType::kF4,
                  .activation_scale_rule = RowScaleRule::kEvenPower};
  EXPECT_TRUE(gpu_rows_support(DType::kF4, quant));
  EXPECT_FALSE(quant::code_rows_support(DType::kF4, quant));
  EXPECT_EQ(quant::row_factor(quant), quant::RowFactor::kNone);
  quant.activation_scale_rule = RowScaleRule::kTwoLevel;
  EXPECT_TRUE(quant::value_rows_support(DType::kF4, quant));
  EXPECT_EQ(quant::row_factor(quant), quant::RowFactor::kStated);
  quant.activation_scale_rule = RowScaleRule::kQuotient;
  EXPECT_FALSE(quant::value_rows_support(DType::kF4, quant));
  quant.power_of_two_scales = true;
  EXPECT_TRUE(quant::value_rows_support(DType::kF4, quant));
}

// One step for all rows has no code that says that a value is not finite; bf16 has one.
TEST(GpuRowsSupport, Int8RowsWithAStatedStep_AreTakenAsValues) {
  const QuantSpec quant{.weights = WeightScale::kChannel,
                        .activations = ActivationScale::kTensorStatic};
  EXPECT_NE(quant::code_rows_support(DType::kI8, quant).reason().find("not finite"),
            std::string::npos);
  EXPECT_TRUE(gpu_rows_support(DType::kI8, quant));
  EXPECT_EQ(quant::row_factor(quant), quant::RowFactor::kStated);
}

}  // namespace
}  // namespace conclave

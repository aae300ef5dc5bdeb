// Which rows of codes a GPU makes.
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
            "takes rows in F8_E4M3 beside weights of F4; found I8");
  quant.activation_dtype = DType::kF8E4M3;
  quant.activation_scale_rule = RowScaleRule::kEvenPower;
  EXPECT_EQ(gpu_rows_support(DType::kF4, quant).reason(),
            "makes scales of rows by RowScaleRule::kQuotient only; with_plain_rows leaves rows as "
            "they are");
}

}  // namespace
}  // namespace conclave

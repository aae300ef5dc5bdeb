#include "layer/cuda/slice_support.h"

#include <gtest/gtest.h>

#include <string>

namespace conclave {
namespace {

std::string reason(const QuantSpec& quant, int64_t inner, int32_t ranks = 2) {
  const Support support = tensor_slices_support(quant, inner, ranks);
  return support ? "accepted" : support.reason();
}

TEST(SliceSupport, SlicesInsideABlockOrOfARowScale_AreRefusedWithAReason) {
  const QuantSpec blocks{.weights = WeightScale::kBlock};
  EXPECT_NE(reason(blocks, 384).find("inside a block of 128x128"), std::string::npos);
  QuantSpec rows{.weights = WeightScale::kChannel, .activations = ActivationScale::kGroup};
  EXPECT_NE(reason(rows, 96).find("inside a group of 128"), std::string::npos);
  rows.activations = ActivationScale::kToken;
  EXPECT_NE(reason(rows, 96).find("one scale each"), std::string::npos);
}

TEST(SliceSupport, WholeBlocksAndGroups_AreTaken) {
  EXPECT_EQ(reason({.weights = WeightScale::kChannel}, 96), "accepted");
  EXPECT_EQ(reason({.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup}, 512),
            "accepted");
  EXPECT_EQ(
      reason({.weights = WeightScale::kBlock, .activations = ActivationScale::kToken}, 100, 1),
      "accepted");
}

TEST(CodedRowsSupport, OtherWidthsAndTypes_AreRefusedWithAReason) {
  QuantSpec quant{.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
  EXPECT_TRUE(coded_rows_support(DType::kI4, quant));
  quant.activation_group = 32;
  const Support support = coded_rows_support(DType::kI4, quant);
  ASSERT_FALSE(support);
  EXPECT_EQ(
      support.reason(),
      "takes rows in groups of 128 columns; found 32; with_plain_rows leaves rows as they are");
  quant.activation_group = 128;
  quant.activation_dtype = DType::kI8;
  EXPECT_TRUE(coded_rows_support(DType::kI4, quant));
  EXPECT_EQ(coded_rows_support(DType::kF4, quant).reason(),
            "takes rows in F8_E4M3 beside weights of F4; found I8");
  quant.activation_dtype = DType::kF8E4M3;
  quant.activation_scale_rule = RowScaleRule::kEvenPower;
  EXPECT_EQ(coded_rows_support(DType::kF4, quant).reason(),
            "makes scales of rows by RowScaleRule::kQuotient only; with_plain_rows leaves rows as "
            "they are");
}

}  // namespace
}  // namespace conclave

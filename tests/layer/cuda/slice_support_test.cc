#include "layer/cuda/slice_support.h"

#include <gtest/gtest.h>

#include <string>

namespace conclave {
namespace {

std::string reason(const QuantSpec& quant, int64_t inner, int32_t ranks = 2) {
  const Support support = tensor_slices_support(quant, inner, ranks);
  return support ? "accepted" : support.reason();
}

TEST(SliceSupport, SlicesInsideAGroupOrOfARowScale_AreRefusedWithAReason) {
  QuantSpec rows{.weights = WeightScale::kChannel, .activations = ActivationScale::kGroup};
  EXPECT_NE(reason(rows, 96).find("inside a group of 128"), std::string::npos);
  rows.activations = ActivationScale::kToken;
  EXPECT_NE(reason(rows, 96).find("one scale each"), std::string::npos);
}

TEST(SliceSupport, WholeBlocksAndGroups_AreTaken) {
  EXPECT_EQ(reason({.weights = WeightScale::kChannel}, 96), "accepted");
  EXPECT_EQ(reason({.weights = WeightScale::kBlock}, 384), "accepted");
  EXPECT_EQ(reason({.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup}, 512),
            "accepted");
  EXPECT_EQ(
      reason({.weights = WeightScale::kBlock, .activations = ActivationScale::kToken}, 100, 1),
      "accepted");
}

}  // namespace
}  // namespace conclave

// The parts of every role, and the role of every combination of parts.
#include "core/weight_id.h"

#include <gtest/gtest.h>

#include <string_view>

namespace conclave {
namespace {

// The name without the parts that the id says.
bool has_word(WeightRole role, std::string_view word) {
  return to_string(role).find(word) != std::string_view::npos;
}

TEST(WeightId, EveryRoleOfAnMlp_IsFoundByItsParts) {
  int of_mlps = 0;
  for (size_t i = 0; i < kNumWeightRoles; ++i) {
    const auto role = static_cast<WeightRole>(i);
    const WeightId id = weight_id(role);
    if (id.mlp == Mlp::kNone) continue;
    ++of_mlps;
    EXPECT_EQ(find_role(id), role) << to_string(role);
    EXPECT_EQ(has_word(role, "shared"), id.mlp == Mlp::kShared) << to_string(role);
    EXPECT_EQ(has_word(role, "residual"), id.mlp == Mlp::kResidual) << to_string(role);
    EXPECT_EQ(has_word(role, "gate"), id.matrix == Matrix::kGate) << to_string(role);
    EXPECT_EQ(has_word(role, "down"), id.matrix == Matrix::kDown) << to_string(role);
    EXPECT_EQ(has_word(role, "bias"), id.plane == Plane::kBias) << to_string(role);
    EXPECT_EQ(has_word(role, "input_scale"), id.plane == Plane::kInputScale) << to_string(role);
  }
  // Two MLPs of three matrices with four planes, and the residual MLP's three matrices.
  EXPECT_EQ(of_mlps, 2 * 3 * 4 + 3);
}

TEST(WeightId, WhatNoLayerHas_IsNotFound) {
  EXPECT_EQ(find_role({Mlp::kResidual, Matrix::kUp, Plane::kBias}), std::nullopt);
  EXPECT_EQ(find_role({Mlp::kNone, Matrix::kUp, Plane::kWeights}), std::nullopt);
  for (const WeightRole role :
       {WeightRole::kRouter, WeightRole::kSharedExpertGate, WeightRole::kExpertScale,
        WeightRole::kRouterInputScale, WeightRole::kLatentDown, WeightRole::kMixGate}) {
    EXPECT_EQ(weight_id(role).mlp, Mlp::kNone) << to_string(role);
  }
}

TEST(WeightId, OtherPlane_IsOfTheSameMatrix) {
  EXPECT_EQ(plane_of(WeightRole::kUp, Plane::kScale), WeightRole::kUpScale);
  EXPECT_EQ(plane_of(WeightRole::kSharedDown, Plane::kInputScale),
            WeightRole::kSharedDownInputScale);
  EXPECT_EQ(plane_of(WeightRole::kSharedGateScale, Plane::kWeights), WeightRole::kSharedGate);
}

}  // namespace
}  // namespace conclave

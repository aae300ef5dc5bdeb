// The parts of every id, and the id of every combination of parts.
#include "conclave/weights.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <string_view>

namespace conclave {
namespace {

bool has_word(WeightId id, std::string_view word) {
  return to_string(id).find(word) != std::string::npos;
}

TEST(WeightId, EveryIndex_IsOneIdWithANameOfItsOwn) {
  std::set<std::string> names;
  for (size_t i = 0; i < WeightId::kCount; ++i) {
    const WeightId id = WeightId::from_index(i);
    EXPECT_EQ(id.index(), i);
    EXPECT_EQ(weights::kAll[i], id);
    EXPECT_TRUE(names.insert(to_string(id)).second) << to_string(id);
  }
}

TEST(WeightId, PlanesOfMlps_AreFoundByTheirParts) {
  int of_mlps = 0;
  for (const WeightId id : weights::kAll) {
    SCOPED_TRACE(to_string(id));
    ASSERT_NE(id.mlp().has_value(), id.layer().has_value());
    if (!id.mlp()) continue;
    ++of_mlps;
    EXPECT_EQ(WeightId(*id.mlp(), *id.matrix(), *id.plane()), id);
    EXPECT_EQ(has_word(id, "shared"), id.mlp() == WeightMlp::kShared);
    EXPECT_EQ(has_word(id, "residual"), id.mlp() == WeightMlp::kResidual);
    EXPECT_EQ(has_word(id, "gate"), id.matrix() == WeightMatrix::kGate);
    EXPECT_EQ(has_word(id, "down"), id.matrix() == WeightMatrix::kDown);
    EXPECT_EQ(has_word(id, "bias"), id.plane() == WeightPlane::kBias);
    EXPECT_EQ(has_word(id, "zero"), id.plane() == WeightPlane::kZero);
    EXPECT_EQ(has_word(id, "input_scale"), id.plane() == WeightPlane::kInputScale);
    EXPECT_EQ(has_word(id, "second_scale"), id.plane() == WeightPlane::kSecondScale);
    EXPECT_EQ(has_word(id, "global_scale"), id.plane() == WeightPlane::kGlobalScale);
    EXPECT_EQ(has_word(id, "column_order"), id.plane() == WeightPlane::kColumnOrder);
    EXPECT_EQ(has_word(id, "column_factor"), id.plane() == WeightPlane::kColumnFactor);
  }
  EXPECT_EQ(of_mlps, 3 * 3 * 9);
}

TEST(WeightId, WeightsOfTheLayer_HaveNoMatrixNorPlane) {
  for (const WeightId id : {weights::kRouter, weights::kSharedExpertGate, weights::kExpertScale,
                            weights::kRouterInputScale, weights::kLatentDown, weights::kMixGate}) {
    SCOPED_TRACE(to_string(id));
    ASSERT_TRUE(id.layer());
    EXPECT_EQ(WeightId(*id.layer()), id);
    EXPECT_FALSE(id.matrix());
    EXPECT_FALSE(id.plane());
  }
}

TEST(WeightId, OtherPlane_IsOfTheSameMatrix) {
  const WeightId scale = weights::kSharedDown.with(WeightPlane::kScale);
  EXPECT_EQ(scale, WeightId(WeightMlp::kShared, WeightMatrix::kDown, WeightPlane::kScale));
  EXPECT_EQ(scale.with(WeightPlane::kWeights), weights::kSharedDown);
  EXPECT_NE(scale, weights::kSharedDown);
}

TEST(WeightTable, EveryId_HasAnEntryOfItsOwn) {
  WeightTable<size_t> table;
  for (const WeightId id : weights::kAll) {
    EXPECT_EQ(table[id], 0U);
    table[id] = id.index() + 1;
  }
  for (const WeightId id : weights::kAll) EXPECT_EQ(table[id], id.index() + 1);
}

}  // namespace
}  // namespace conclave

#include "routing/routing_problem.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <vector>

namespace conclave {
namespace {

using testing::RoutingResult;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(TopkSpecialValues, OneNan_ComparesAsMinusInfinity) {
  for (const auto renormalize : {Renormalize::kNone, Renormalize::kSum}) {
    const MoeSpec spec = testing::router_spec(4, 2, renormalize);
    const RoutingResult with_nan = testing::route(spec, {1.0F, kNan, 3.0F, 2.0F});
    EXPECT_EQ(with_nan, testing::route(spec, {1.0F, -kInf, 3.0F, 2.0F}));
    EXPECT_EQ(with_nan.ids, (std::vector<int32_t>{2, 3}));
    EXPECT_EQ(with_nan.without_finite_logit, 0);
  }
}

TEST(TopkSpecialValues, FewerFiniteThanChosen_FillWithWeightZero) {
  const RoutingResult result = testing::route(testing::router_spec(5, 3, Renormalize::kSum),
                                              {kNan, -kInf, 7.0F, kNan, -kInf});
  EXPECT_EQ(result.ids, (std::vector<int32_t>{2, 0, 1}));
  EXPECT_EQ(result.weights, (std::vector<float>{1.0F, 0.0F, 0.0F}));
  EXPECT_EQ(result.without_finite_logit, 0);
}

TEST(TopkSpecialValues, NothingToOrder_GivesFirstIdsWithWeightZeroAndCounts) {
  for (const auto renormalize : {Renormalize::kNone, Renormalize::kSum}) {
    for (const int64_t experts : {1, 2, 6, 8, 16, 128}) {
      for (const float value : {kNan, -kInf}) {
        const int64_t top_k = (experts + 1) / 2;
        const std::vector<float> logits(static_cast<size_t>(3 * experts), value);
        const RoutingResult result =
            testing::route(testing::router_spec(experts, top_k, renormalize), logits);
        EXPECT_EQ(result.without_finite_logit, 3);
        for (int64_t i = 0; i < 3 * top_k; ++i) {
          EXPECT_EQ(result.ids[static_cast<size_t>(i)], i % top_k);
          EXPECT_EQ(result.weights[static_cast<size_t>(i)], 0.0F);
        }
      }
    }
  }
}

TEST(TopkSpecialValues, NanRows_LeaveOtherRowsUntouched) {
  const MoeSpec spec = testing::router_spec(8, 2, Renormalize::kNone);
  std::vector<float> logits = testing::random_logits(3, 8, 1.0F, 23);
  const RoutingResult clean = testing::route(spec, logits);
  for (size_t e = 8; e < 16; ++e) logits[e] = kNan;
  const RoutingResult poisoned = testing::route(spec, logits);
  EXPECT_EQ(poisoned.without_finite_logit, 1);
  for (const size_t i : {0U, 1U, 4U, 5U}) {
    EXPECT_EQ(poisoned.ids[i], clean.ids[i]);
    EXPECT_EQ(poisoned.weights[i], clean.weights[i]);
  }
}

TEST(TopkSpecialValues, OneInfinity_TakesAllTheWeight) {
  for (const auto renormalize : {Renormalize::kNone, Renormalize::kSum}) {
    const RoutingResult result =
        testing::route(testing::router_spec(4, 2, renormalize), {3e38F, 1.0F, kInf, -kInf});
    EXPECT_EQ(result.ids, (std::vector<int32_t>{2, 0}));
    EXPECT_EQ(result.weights, (std::vector<float>{1.0F, 0.0F}));
    EXPECT_EQ(result.without_finite_logit, 0);
  }
}

TEST(TopkSpecialValues, SeveralInfinities_ShareEqually) {
  const std::vector<float> logits = {0.0F, kInf, kNan, kInf, kInf, kInf};
  const RoutingResult plain =
      testing::route(testing::router_spec(6, 3, Renormalize::kNone), logits);
  EXPECT_EQ(plain.ids, (std::vector<int32_t>{1, 3, 4}));
  EXPECT_EQ(plain.weights, (std::vector<float>{0.25F, 0.25F, 0.25F}));
  const RoutingResult sum = testing::route(testing::router_spec(6, 2, Renormalize::kSum), logits);
  EXPECT_EQ(sum.ids, (std::vector<int32_t>{1, 3}));
  EXPECT_EQ(sum.weights, (std::vector<float>{0.5F, 0.5F}));
}

TEST(TopkSpecialValues, InfiniteScores_ShareByTheNormThatDivides) {
  const std::vector<float> logits = {kInf, 0.0F, kInf, kInf, 1.0F, kInf};
  const auto weights = [&](RouterScore score, Renormalize renormalize, double p) {
    MoeSpec spec = testing::router_spec(6, 5, renormalize);
    spec.router.score = score;
    spec.router.renormalize_p = p;
    const RoutingResult result = testing::route(spec, logits);
    EXPECT_EQ(result.ids, (std::vector<int32_t>{0, 2, 3, 5, 4}));
    return result.weights;
  };
  // Neither score bounds an infinite logit; the norm of four equal ones is 4^(1/p) times one of
  // them.
  for (const auto score : {RouterScore::kNone, RouterScore::kSqrtSoftplus}) {
    EXPECT_EQ(weights(score, Renormalize::kSum, 1),
              (std::vector<float>{0.25F, 0.25F, 0.25F, 0.25F, 0.0F}));
    EXPECT_EQ(weights(score, Renormalize::kPNorm, 2),
              (std::vector<float>{0.5F, 0.5F, 0.5F, 0.5F, 0.0F}));
    EXPECT_EQ(weights(score, Renormalize::kPNorm, 0.5),
              (std::vector<float>{0.0625F, 0.0625F, 0.0625F, 0.0625F, 0.0F}));
  }
}

TEST(TopkSpecialValues, InfinityWithoutFiniteLogit_StillCountsAsUsable) {
  const RoutingResult result =
      testing::route(testing::router_spec(3, 2, Renormalize::kSum), {kNan, kInf, -kInf});
  EXPECT_EQ(result.ids, (std::vector<int32_t>{1, 0}));
  EXPECT_EQ(result.weights, (std::vector<float>{1.0F, 0.0F}));
  EXPECT_EQ(result.without_finite_logit, 0);
}

TEST(TopkSpecialValues, RandomMixtures_EqualTheReferenceAndStayUniqueAndFinite) {
  std::mt19937 generator(29);
  const std::vector<float> values = {kNan,  kInf,  -kInf,   0.0F,  -0.0F,  1.0F,
                                     -2.0F, 88.8F, -103.9F, 3e38F, -3e38F, 1e-45F};
  std::uniform_int_distribution<size_t> pick(0, values.size() - 1);
  for (const int64_t experts : {6, 8, 16}) {
    for (const int64_t top_k : {int64_t{1}, int64_t{3}, experts}) {
      for (const auto renormalize : {Renormalize::kNone, Renormalize::kSum}) {
        const MoeSpec spec = testing::router_spec(experts, top_k, renormalize);
        SCOPED_TRACE(testing::describe(spec));
        std::vector<float> logits(static_cast<size_t>(500 * experts));
        for (float& logit : logits) logit = values[pick(generator)];
        const RoutingResult actual = testing::route(spec, logits);
        const RoutingResult expected = testing::oracle(spec, logits);
        ASSERT_EQ(actual.ids, expected.ids);
        ASSERT_EQ(actual.without_finite_logit, expected.without_finite_logit);
        for (size_t i = 0; i < actual.weights.size(); ++i) {
          ASSERT_TRUE(std::isfinite(actual.weights[i]));
          ASSERT_LE(testing::ulp_distance(actual.weights[i], expected.weights[i]), 2);
        }
        for (size_t row = 0; row < 500; ++row) {
          const auto first = actual.ids.begin() + static_cast<std::ptrdiff_t>(row) * top_k;
          ASSERT_EQ(std::set<int32_t>(first, first + top_k).size(), static_cast<size_t>(top_k));
        }
      }
    }
  }
}

}  // namespace
}  // namespace conclave

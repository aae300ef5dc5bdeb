#include "routing/topk/topk.h"

#include "routing/routing_problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace conclave {
namespace {

using testing::RoutingResult;

void expect_equals_oracle(const MoeSpec& spec, const std::vector<float>& logits) {
  testing::expect_equals_oracle({.spec = spec, .logits = logits});
}

TEST(Topk, FieldShapes_EqualTheReference) {
  for (const auto renormalize : {Renormalize::kNone, Renormalize::kSum}) {
    for (const int64_t experts : {1, 2, 6, 8, 16, 60, 64, 128, 192, 257, 513}) {
      for (const int64_t top_k : {1, 2, 3, 4, 6, 8}) {
        if (top_k > experts) continue;
        for (const int64_t tokens : {0, 1, 33, 56}) {
          expect_equals_oracle(testing::router_spec(experts, top_k, renormalize),
                               testing::random_logits(tokens, experts, 1.0F, 7));
        }
      }
    }
  }
}

TEST(Topk, AllExpertsChosen_AreSortedByScore) {
  for (const int64_t experts : {1, 2, 9, 64, 513}) {
    for (const auto renormalize : {Renormalize::kNone, Renormalize::kSum}) {
      expect_equals_oracle(testing::router_spec(experts, experts, renormalize),
                           testing::random_logits(3, experts, 2.0F, 11));
    }
  }
}

TEST(Topk, WideLogits_StayWithinTwoUlp) {
  // With differences of tens, a float32 x - max would lose bits; hundreds underflow.
  for (const float spread : {1e-6F, 0.1F, 10.0F, 30.0F, 100.0F, 1e4F, 1e30F}) {
    for (const auto renormalize : {Renormalize::kNone, Renormalize::kSum}) {
      expect_equals_oracle(testing::router_spec(128, 8, renormalize),
                           testing::random_logits(64, 128, spread, 3));
    }
  }
}

TEST(Topk, AllNegativeLogits_AreRoutedLikeAnyOther) {
  std::vector<float> logits = testing::random_logits(16, 64, 1.0F, 5);
  for (float& logit : logits) logit -= 1000.0F;
  expect_equals_oracle(testing::router_spec(64, 6, Renormalize::kSum), logits);
  expect_equals_oracle(testing::router_spec(64, 6, Renormalize::kNone), logits);
}

TEST(Topk, TiedScores_PickTheLowerIds) {
  const MoeSpec spec = testing::router_spec(6, 3, Renormalize::kSum);
  EXPECT_EQ(testing::route(spec, {1, 1, 1, 1, 1, 1}).ids, (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(testing::route(spec, {0, 2, 1, 2, 1, 2}).ids, (std::vector<int32_t>{1, 3, 5}));
  EXPECT_EQ(testing::route(spec, {0, 2, 1, 0, 1, 0}).ids, (std::vector<int32_t>{1, 2, 4}));
  EXPECT_EQ(testing::route(spec, {0.0F, -0.0F, 0.0F, -1, -1, -1}).ids,
            (std::vector<int32_t>{0, 1, 2}));
}

TEST(Topk, CoarseLogits_BreakManyTiesLikeTheReference) {
  std::vector<float> logits = testing::random_logits(200, 64, 2.0F, 13);
  for (float& logit : logits) logit = static_cast<float>(static_cast<int>(logit));
  expect_equals_oracle(testing::router_spec(64, 8, Renormalize::kSum), logits);
}

TEST(Topk, ScoresThatUnderflow_KeepTheOrderOfTheLogits) {
  // exp(-200) and exp(-300) are both 0 in float32, but expert 2 scores higher than expert 1.
  const RoutingResult result =
      testing::route(testing::router_spec(3, 2, Renormalize::kSum), {0.0F, -300.0F, -200.0F});
  EXPECT_EQ(result.ids, (std::vector<int32_t>{0, 2}));
  EXPECT_EQ(result.weights, (std::vector<float>{1.0F, 0.0F}));
}

TEST(Topk, Renormalised_SumsToOne) {
  const RoutingResult result = testing::route(testing::router_spec(128, 8, Renormalize::kSum),
                                              testing::random_logits(50, 128, 1.0F, 17));
  for (size_t row = 0; row < 50; ++row) {
    double sum = 0;
    for (size_t j = 0; j < 8; ++j) sum += static_cast<double>(result.weights[row * 8 + j]);
    // There are eight weights, each rounded once to float32.
    EXPECT_NEAR(sum, 1.0, 8 * 0x1p-24);
  }
}

TEST(Topk, AnyBatchAndThreads_GiveTheSameBits) {
  const MoeSpec spec = testing::router_spec(128, 8, Renormalize::kNone);
  const std::vector<float> logits = testing::random_logits(300, 128, 1.0F, 19);
  const RoutingResult whole = testing::route(spec, logits);
  testing::SerialExecutor reversed(5);
  testing::ThreadExecutor threads(3);
  EXPECT_EQ(testing::route(spec, logits, reversed), whole);
  EXPECT_EQ(testing::route(spec, logits, threads), whole);
  for (const size_t row : {0U, 1U, 31U, 32U, 33U, 299U}) {
    const std::vector<float> alone(logits.begin() + static_cast<std::ptrdiff_t>(row * 128),
                                   logits.begin() + static_cast<std::ptrdiff_t>(row * 128 + 128));
    const RoutingResult single = testing::route(spec, alone);
    EXPECT_TRUE(std::equal(single.ids.begin(), single.ids.end(),
                           whole.ids.begin() + static_cast<int>(row * 8)));
    EXPECT_TRUE(std::equal(single.weights.begin(), single.weights.end(),
                           whole.weights.begin() + static_cast<int>(row * 8)));
  }
}

}  // namespace
}  // namespace conclave

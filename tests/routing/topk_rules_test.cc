// Compares the parts of router "topk" one by one with values worked out by hand, then together with
// the oracle in random combinations.
#include "routing/random_spec.h"
#include "routing/routing_problem.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <vector>

namespace conclave {
namespace {

using testing::RoutingProblem;
using testing::RoutingResult;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
using Ids = std::vector<int32_t>;

MoeSpec with(int64_t experts, int64_t top_k, RouterSpec router) {
  MoeSpec spec = testing::router_spec(experts, top_k, router.renormalize);
  spec.router = std::move(router);
  validate(spec);
  return spec;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

TEST(TopkScores, Sigmoid_WeighsByTheSigmoidOfEachLogit) {
  const MoeSpec spec =
      with(3, 2, {.score = RouterScore::kSigmoid, .renormalize = Renormalize::kNone});
  const RoutingResult result = testing::route(spec, {-1.0F, 2.0F, 0.5F});
  EXPECT_EQ(result.ids, (Ids{1, 2}));
  EXPECT_FLOAT_EQ(result.weights[0], static_cast<float>(sigmoid(2)));
  EXPECT_FLOAT_EQ(result.weights[1], static_cast<float>(sigmoid(0.5)));
}

TEST(TopkScores, SqrtSoftplus_IsAccurateAtBothEnds) {
  const MoeSpec spec =
      with(3, 3, {.score = RouterScore::kSqrtSoftplus, .renormalize = Renormalize::kNone});
  const RoutingResult result = testing::route(spec, {-80.0F, 100.0F, 0.0F});
  EXPECT_EQ(result.ids, (Ids{1, 2, 0}));
  EXPECT_FLOAT_EQ(result.weights[0], 10.0F);
  EXPECT_FLOAT_EQ(result.weights[1], static_cast<float>(std::sqrt(std::log(2.0))));
  EXPECT_FLOAT_EQ(result.weights[2], static_cast<float>(std::exp(-40.0)));
}

TEST(TopkScores, None_WeighsByTheLogitWhateverItsSign) {
  const MoeSpec spec = with(3, 2, {.score = RouterScore::kNone, .renormalize = Renormalize::kNone});
  const RoutingResult result = testing::route(spec, {-5.0F, -3.0F, -4.0F});
  EXPECT_EQ(result.ids, (Ids{1, 2}));
  EXPECT_EQ(result.weights, (std::vector<float>{-3.0F, -4.0F}));
}

TEST(TopkScores, ChosenFirst_SoftmaxRunsOverTheChosenOnly) {
  const MoeSpec spec =
      with(4, 2, {.order = RouterOrder::kTopkThenScore, .renormalize = Renormalize::kNone});
  const RoutingResult result = testing::route(spec, {0.0F, 1.0F, 5.0F, 4.0F});
  EXPECT_EQ(result.ids, (Ids{2, 3}));
  EXPECT_FLOAT_EQ(result.weights[0], static_cast<float>(1 / (1 + std::exp(-1.0))));
}

TEST(TopkScores, SoftCap_BoundsLogitsBeforeTheSoftmax) {
  const MoeSpec spec = with(2, 2, {.soft_cap = 30, .renormalize = Renormalize::kNone});
  const RoutingResult result = testing::route(spec, {60.0F, 0.0F});
  const double capped = 30 * std::tanh(2.0);
  EXPECT_FLOAT_EQ(result.weights[1], static_cast<float>(1 / (1 + std::exp(capped))));
}

TEST(TopkScores, ScoreType_RoundsBeforeComparingSoThatTiesGoByIndex) {
  RouterSpec router{.score = RouterScore::kSigmoid, .renormalize = Renormalize::kNone};
  EXPECT_EQ(testing::route(with(3, 1, router), {0.0F, 1.000F, 1.001F}).ids, (Ids{2}));
  router.score_dtype = DType::kBF16;
  const RoutingResult rounded = testing::route(with(3, 1, router), {0.0F, 1.000F, 1.001F});
  EXPECT_EQ(rounded.ids, (Ids{1}));
  EXPECT_FLOAT_EQ(rounded.weights[0], static_cast<float>(1 / (1 + std::exp(-1.0))));
}

TEST(TopkBias, SelectionBias_ChoosesButDoesNotWeigh) {
  RoutingProblem problem{.spec = with(3, 1,
                                      {.score = RouterScore::kSigmoid,
                                       .has_selection_bias = true,
                                       .renormalize = Renormalize::kNone}),
                         .logits = {2.0F, 0.0F, 1.0F}};
  problem.selection_bias = {0.0F, 0.9F, 0.0F};
  const RoutingResult result = testing::route(problem);
  EXPECT_EQ(result.ids, (Ids{1}));
  EXPECT_EQ(result.weights[0], 0.5F);
}

TEST(TopkBias, BiasedScoresFarBelowMinusOne_AreStillOrdered) {
  RoutingProblem problem{
      .spec = with(3, 2, {.score = RouterScore::kSigmoid, .has_selection_bias = true}),
      .logits = {0.0F, 0.0F, 0.0F}};
  problem.selection_bias = {-50.0F, -3.0F, -20000.0F};
  const RoutingResult result = testing::route(problem);
  EXPECT_EQ(result.ids, (Ids{1, 0}));
  EXPECT_EQ(result.weights, (std::vector<float>{0.5F, 0.5F}));
}

TEST(TopkBias, AbsentLogit_IsNotChosenForItsBias) {
  RoutingProblem problem{
      .spec = with(4, 2, {.score = RouterScore::kSigmoid, .has_selection_bias = true}),
      .logits = {kNan, 0.0F, -kInf, -9.0F}};
  problem.selection_bias = {5.0F, 0.0F, 5.0F, -5.0F};
  EXPECT_EQ(testing::route(problem).ids, (Ids{1, 3}));
}

TEST(TopkBias, InfiniteLogit_BeatsAnyBias) {
  RoutingProblem problem{
      .spec = with(3, 1, {.score = RouterScore::kSigmoid, .has_selection_bias = true}),
      .logits = {0.0F, kInf, 9.0F}};
  problem.selection_bias = {50.0F, -50.0F, 7.0F};
  const RoutingResult result = testing::route(problem);
  EXPECT_EQ(result.ids, (Ids{1}));
  EXPECT_EQ(result.weights[0], 1.0F);
}

TEST(TopkGroups, Max_KeepsTheGroupsOfTheBestExperts) {
  const MoeSpec spec =
      with(6, 2, {.num_groups = 3, .topk_groups = 1, .group_score = GroupScore::kMax});
  EXPECT_EQ(testing::route(spec, {5, 0, 4, 4.5, 3, 3}).ids, (Ids{0, 1}));
}

TEST(TopkGroups, TopTwoSum_PrefersTheGroupWithTheBetterPair) {
  const MoeSpec spec = with(6, 2,
                            {.score = RouterScore::kSigmoid,
                             .num_groups = 3,
                             .topk_groups = 1,
                             .group_score = GroupScore::kTop2Sum});
  EXPECT_EQ(testing::route(spec, {5, -9, 4, 3, 1, 1}).ids, (Ids{2, 3}));
}

TEST(TopkGroups, TiedGroups_KeepTheLowerIds) {
  const MoeSpec spec =
      with(8, 2, {.score = RouterScore::kSigmoid, .num_groups = 4, .topk_groups = 2});
  EXPECT_EQ(testing::route(spec, {1, 1, 1, 1, 1, 1, 1, 1}).ids, (Ids{0, 1}));
  EXPECT_EQ(testing::route(spec, {0, 0, 1, 1, 1, 1, 1, 1}).ids, (Ids{2, 3}));
}

TEST(TopkGroups, MaskKinds_DifferWhereKeptScoresAreNegative) {
  RouterSpec router{.score = RouterScore::kSigmoid,
                    .has_selection_bias = true,
                    .num_groups = 2,
                    .topk_groups = 1,
                    .renormalize = Renormalize::kNone};
  RoutingProblem problem{.spec = with(4, 2, router), .logits = {0, 0, 0, 0}};
  problem.selection_bias = {0.0F, -1.9F, -0.9F, -0.9F};
  EXPECT_EQ(testing::route(problem).ids, (Ids{2, 3}));
  problem.selection_bias = {0.0F, -1.0F, -2.0F, -2.0F};
  EXPECT_EQ(testing::route(problem).ids, (Ids{0, 1}));
  // Experts of the group that is left out compare as 0, ahead of the kept one at -0.5.
  problem.spec.router.group_mask = GroupMask::kZero;
  const RoutingResult zero = testing::route(problem);
  EXPECT_EQ(zero.ids, (Ids{0, 2}));
  EXPECT_EQ(zero.weights, (std::vector<float>{0.5F, 0.5F}));
}

TEST(TopkGroups, MaskedExperts_FillUpWithWeightZero) {
  const MoeSpec spec = with(4, 2,
                            {.score = RouterScore::kSigmoid,
                             .num_groups = 2,
                             .topk_groups = 1,
                             .renormalize = Renormalize::kNone});
  // A NaN adds nothing to its group, and the slot it leaves does not go to an expert of another
  // group.
  const RoutingResult result = testing::route(spec, {9.0F, kNan, 1.0F, -30.0F});
  EXPECT_EQ(result.ids, (Ids{0, 1}));
  EXPECT_EQ(result.weights[1], 0.0F);
  const RoutingResult filled = testing::route(spec, {kNan, kNan, 1.0F, kNan});
  EXPECT_EQ(filled.ids, (Ids{2, 0}));
  EXPECT_EQ(filled.weights[1], 0.0F);
}

TEST(TopkRenormalize, EachKind_MatchesItsFormula) {
  const auto weights = [](RouterSpec router) {
    router.score = RouterScore::kNone;
    return testing::route(with(2, 2, std::move(router)), {3.0F, 1.0F}).weights;
  };
  EXPECT_EQ(weights({.renormalize = Renormalize::kSum}), (std::vector<float>{0.75F, 0.25F}));
  EXPECT_EQ(weights({.renormalize = Renormalize::kSum, .epsilon = 4}),
            (std::vector<float>{0.375F, 0.125F}));
  EXPECT_EQ(
      weights(
          {.renormalize = Renormalize::kSum, .epsilon = 8, .epsilon_mode = EpsilonMode::kClampMin}),
      (std::vector<float>{0.375F, 0.125F}));
  EXPECT_FLOAT_EQ(weights({.renormalize = Renormalize::kPNorm, .renormalize_p = 2})[0],
                  static_cast<float>(3 / std::sqrt(10.0)));
  EXPECT_FLOAT_EQ(weights({.renormalize = Renormalize::kSoftmax})[0],
                  static_cast<float>(sigmoid(2)));
}

TEST(TopkRenormalize, SumOfZero_LeavesZerosAndNoNan) {
  for (const auto renormalize : {Renormalize::kSum, Renormalize::kPNorm}) {
    const MoeSpec spec = with(3, 2, {.score = RouterScore::kSigmoid, .renormalize = renormalize});
    EXPECT_EQ(testing::route(spec, {-1e30F, -1e30F, -1e30F}).weights,
              (std::vector<float>{0.0F, 0.0F}));
  }
}

TEST(TopkRenormalize, ScoresThatFloatCannotHold_StillShareByRatio) {
  const MoeSpec spec = with(3, 2, {.score = RouterScore::kSigmoid});
  const RoutingResult result = testing::route(spec, {-300.0F, -300.0F, -400.0F});
  EXPECT_EQ(result.weights, (std::vector<float>{0.5F, 0.5F}));
}

TEST(TopkRenormalize, ScoresWhosePowersLeaveDouble_StillHaveTheirNorm) {
  const auto weights = [](RouterScore score, double p, const std::vector<float>& logits) {
    const RouterSpec router{.score = score, .renormalize = Renormalize::kPNorm, .renormalize_p = p};
    return testing::route(with(3, 2, router), logits).weights;
  };
  // 1e38^16 is infinite as a double, and e^-300 to the fourth power is 0.
  const auto large = weights(RouterScore::kNone, 16, {1e38F, 0.0F, 1e38F});
  EXPECT_FLOAT_EQ(large[0], static_cast<float>(std::pow(2.0, -1.0 / 16)));
  EXPECT_EQ(large[1], large[0]);
  const auto small = weights(RouterScore::kSigmoid, 4, {-300.0F, -400.0F, -300.0F});
  EXPECT_FLOAT_EQ(small[0], static_cast<float>(std::pow(2.0, -1.0 / 4)));
  EXPECT_EQ(small[1], small[0]);
}

TEST(TopkScales, AllOfThem_MultiplyAfterRenormalising) {
  RoutingProblem problem{.spec = with(3, 2,
                                      {.score = RouterScore::kNone,
                                       .scale = 2.5,
                                       .has_expert_scale = true,
                                       .has_global_scale = true}),
                         .logits = {1.0F, 3.0F, 0.0F}};
  problem.expert_scale = {4.0F, 0.5F, 100.0F};
  problem.global_scale = {2.0F};
  EXPECT_EQ(testing::route(problem).weights, (std::vector<float>{1.875F, 5.0F}));
}

TEST(TopkZeroExperts, TakePartAndHaveNoScaleOfTheirOwn) {
  MoeSpec spec = with(2, 2, {.score = RouterScore::kNone, .has_expert_scale = true});
  spec.num_zero_experts = 2;
  RoutingProblem problem{.spec = spec, .logits = {1.0F, 0.0F, 0.5F, 3.0F}};
  problem.expert_scale = {8.0F, 8.0F};
  const RoutingResult result = testing::route(problem);
  EXPECT_EQ(result.ids, (Ids{3, 0}));
  EXPECT_EQ(result.weights, (std::vector<float>{0.75F, 2.0F}));
}

TEST(TopkProperty, RandomSpecs_EqualTheOracle) {
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    std::mt19937 generator(seed);
    const MoeSpec spec = testing::random_topk_spec(generator);
    SCOPED_TRACE("seed " + std::to_string(seed));
    ASSERT_NO_THROW(validate(spec));
    const float spread = std::vector<float>{0.05F, 1.0F, 4.0F}[generator() % 3];
    RoutingProblem problem = testing::random_problem(spec, 9, spread, seed);
    // Sums of scores with both signs cancel, which no number of digits survives: kNone keeps its
    // sign.
    const bool cancels =
        spec.router.renormalize == Renormalize::kSum && spec.router.score == RouterScore::kNone;
    if (cancels) {
      for (float& logit : problem.logits) logit = std::abs(logit) + 0.1F;
    }
    testing::expect_equals_oracle(problem);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(TopkProperty, ManyChoices_EqualTheOracle) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    std::mt19937 generator(seed);
    const MoeSpec spec = testing::random_wide_topk_spec(generator);
    SCOPED_TRACE("seed " + std::to_string(seed));
    ASSERT_NO_THROW(validate(spec));
    EXPECT_GT(spec.top_k, 32);
    EXPECT_LE(spec.num_experts + spec.num_zero_experts, 1024);
    RoutingProblem problem = testing::random_problem(spec, 3, 1.0F, seed);
    const bool cancels =
        spec.router.renormalize == Renormalize::kSum && spec.router.score == RouterScore::kNone;
    if (cancels) {
      for (float& logit : problem.logits) logit = std::abs(logit) + 0.1F;
    }
    testing::expect_equals_oracle(problem);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(TopkProperty, RandomSpecs_SurviveSpecialValues) {
  const std::vector<float> values = {kNan, kInf, -kInf, 0.0F, -0.0F, 1.0F, -2.0F, 80.0F, -90.0F};
  for (uint32_t seed = 0; seed < 1500; ++seed) {
    std::mt19937 generator(seed);
    MoeSpec spec = testing::random_topk_spec(generator);
    if (spec.router.score == RouterScore::kNone ||
        spec.router.score == RouterScore::kSqrtSoftplus) {
      // These scores give +Inf the weight +Inf if nothing divides by it.
      spec.router.score = RouterScore::kSigmoid;
    }
    SCOPED_TRACE("seed " + std::to_string(seed));
    RoutingProblem problem = testing::random_problem(spec, 9, 1.0F, seed);
    for (float& logit : problem.logits) logit = values[generator() % values.size()];
    testing::expect_equals_oracle(problem);
    const RoutingResult result = testing::route(problem);
    for (size_t row = 0; row < 9; ++row) {
      const auto first = result.ids.begin() + static_cast<std::ptrdiff_t>(row) * spec.top_k;
      ASSERT_EQ(std::set<int32_t>(first, first + spec.top_k).size(),
                static_cast<size_t>(spec.top_k));
    }
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace conclave

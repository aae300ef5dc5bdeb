// Compares routers that have rules of their own with values worked out by hand.
#include "routing/routing_problem.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::RoutingProblem;
using testing::RoutingResult;
using testing::spec_of_row;
using Ids = std::vector<int32_t>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

MoeSpec sized(std::string_view name, int64_t experts, int64_t top_k) {
  MoeSpec spec = spec_of_row(name);
  spec.num_experts = experts;
  spec.top_k = top_k;
  return spec;
}

TEST(HashRouter, TokenIds_PickRowsOfTheTable) {
  MoeSpec spec = sized("hash", 4, 2);
  spec.router.vocab_size = 3;
  spec.router.score = RouterScore::kSqrtSoftplus;
  RoutingProblem problem{.spec = spec, .logits = {0, 1, 2, 3, 0, 1, 2, 3}};
  problem.tensors = {{0, 1, 3, 2, 1, 1}};
  problem.token_ids = {1, 2};
  const RoutingResult result = testing::route(problem);
  EXPECT_EQ(result.ids, (Ids{3, 2, 1, 1}));
  const double s3 = std::sqrt(std::log1p(std::exp(3.0)));
  const double s2 = std::sqrt(std::log1p(std::exp(2.0)));
  EXPECT_FLOAT_EQ(result.weights[0], static_cast<float>(s3 / (s3 + s2)));
  // A table may name an expert twice.
  EXPECT_EQ(result.weights[2], 0.5F);
}

TEST(HashRouter, EveryScoreAndRenormalization_EqualsTheOracle) {
  for (int score = 0; score < 4; ++score) {
    for (int order = 0; order < 2; ++order) {
      for (int renormalize = 0; renormalize < 4; ++renormalize) {
        MoeSpec spec = sized("hash", 10, 3);
        spec.router.score = static_cast<RouterScore>(score);
        spec.router.order = static_cast<RouterOrder>(order);
        spec.router.renormalize = static_cast<Renormalize>(renormalize);
        spec.router.scale = 1.5;
        RoutingProblem problem = testing::random_problem(spec, 33, 1.0F, 17);
        if (spec.router.score == RouterScore::kNone) {
          for (float& logit : problem.logits) logit = std::abs(logit);
        }
        testing::expect_equals_oracle(problem);
      }
    }
  }
}

TEST(SparseMixer, TwoRounds_WeighEachChoiceAmongItsOwnNeighbours) {
  // With epsilon 0.1, neighbours lie within 20 percent. Round one takes 10 and 9 (1 / 10), not 7 (3
  // / 10). Round two takes 9 alone, because (9 - 7) / 9 is more than 0.2.
  MoeSpec spec = sized("sparse_mixer", 3, 2);
  spec.router.jitter_epsilon = 0.1;
  const RoutingResult result = testing::route(spec, {9.0F, 7.0F, 10.0F});
  EXPECT_EQ(result.ids, (Ids{2, 0}));
  EXPECT_FLOAT_EQ(result.weights[0], static_cast<float>(1 / (1 + std::exp(-1.0))));
  EXPECT_EQ(result.weights[1], 1.0F);
}

TEST(SparseMixer, NegativeLogits_CompareByTheLargerMagnitude) {
  MoeSpec spec = sized("sparse_mixer", 3, 2);
  spec.router.jitter_epsilon = 0.25;
  // By (m - l) / |l|, (-1 + 2) / 2 = 0.5 is not above 0.5, but (-1 + 4) / 4 is.
  const RoutingResult result = testing::route(spec, {-1.0F, -2.0F, -4.0F});
  EXPECT_EQ(result.ids, (Ids{0, 1}));
  EXPECT_FLOAT_EQ(result.weights[0], static_cast<float>(1 / (1 + std::exp(-1.0))));
  EXPECT_FLOAT_EQ(result.weights[1], static_cast<float>(1 / (1 + std::exp(-2.0))));
}

TEST(SparseMixer, RandomLogits_EqualTheOracleAtAnyEpsilon) {
  for (const double epsilon : {0.0, 0.01, 0.3, 2.0}) {
    for (const int64_t experts : {2, 3, 16, 60}) {
      MoeSpec spec = sized("sparse_mixer", experts, 2);
      spec.router.jitter_epsilon = epsilon;
      testing::expect_equals_oracle(testing::random_problem(spec, 56, 1.0F, 7));
    }
  }
}

TEST(SparseMixer, FewUsableLogits_KeepIdsDistinct) {
  const MoeSpec spec = sized("sparse_mixer", 3, 2);
  EXPECT_EQ(testing::route(spec, {kNan, kNan, kNan}).ids, (Ids{0, 1}));
  EXPECT_EQ(testing::route(spec, {kNan, kNan, kNan}).without_finite_logit, 1);
  const RoutingResult one = testing::route(spec, {5.0F, kNan, -kInf});
  EXPECT_EQ(one.ids, (Ids{0, 1}));
  EXPECT_EQ(one.weights, (std::vector<float>{1.0F, 0.0F}));
}

TEST(SinkSoftmax, SharedLogits_TakeTheirPartOfTheWeight) {
  MoeSpec spec = sized("sink_softmax", 2, 1);
  spec.router.scale = 4;
  spec.router.has_global_scale = true;
  RoutingProblem problem{.spec = spec, .logits = {0.0F, 1.0F, 1.0F, 1.0F}};
  problem.global_scale = {1.5F};
  const RoutingResult result = testing::route(problem);
  EXPECT_EQ(result.ids, (Ids{1}));
  EXPECT_FLOAT_EQ(result.weights[0], 2.0F);
  EXPECT_FLOAT_EQ(result.shared_weights[0], 2.0F);
  EXPECT_FLOAT_EQ(result.shared_weights[1], 2.0F);
}

TEST(SinkSoftmax, SelectionBias_ChoosesOnlyAndSharedExpertsNeverCompete) {
  MoeSpec spec = sized("sink_softmax", 3, 1);
  spec.router.has_selection_bias = true;
  RoutingProblem problem{.spec = spec, .logits = {0.0F, 2.0F, 0.0F, 90.0F, -90.0F}};
  problem.selection_bias = {0.0F, 0.0F, 0.9F};
  const RoutingResult result = testing::route(problem);
  EXPECT_EQ(result.ids, (Ids{2}));
  // sigmoid(0) = 1/2 against sigmoid(90) = 1: log-sigmoid, not the logit, enters the softmax.
  EXPECT_FLOAT_EQ(result.weights[0], static_cast<float>(1.0 / 3));
  EXPECT_FLOAT_EQ(result.shared_weights[0], static_cast<float>(2.0 / 3));
  EXPECT_LT(result.shared_weights[1], 1e-30F);
}

TEST(SinkSoftmax, RandomSpecs_EqualTheOracle) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    MoeSpec spec = sized("sink_softmax", 4 + seed % 13, 1 + seed % 4);
    spec.shared.count = 1 + seed % 3;
    spec.router.has_selection_bias = seed % 2 == 0;
    spec.router.has_global_scale = seed % 3 == 0;
    spec.router.scale = seed % 5 == 0 ? 8.0 : 1.0;
    testing::expect_equals_oracle(testing::random_problem(spec, 17, 3.0F, seed));
  }
}

TEST(SoftmaxThresholdRouter, ChoicesBelowTheRatio_AreDropped) {
  MoeSpec spec = sized("softmax_threshold", 4, 3);
  // Shares fall by e from one to the next: 1 / e and 1 / e^2 of the best one's.
  const std::vector<float> logits = {1.0F, 3.0F, 0.0F, 2.0F};
  const auto routed = [&](double ratio) {
    spec.router.options = {{"ratio", ratio}};
    return testing::route(spec, logits);
  };
  EXPECT_EQ(routed(0.1).ids, (Ids{1, 3, 0}));
  EXPECT_EQ(routed(0.2).ids, (Ids{1, 3, -1}));
  EXPECT_EQ(routed(1).ids, (Ids{1, -1, -1}));
  EXPECT_EQ(routed(1).weights, (std::vector<float>{1, 0, 0}));
  const auto share = static_cast<float>(1 / (1 + std::exp(-1.0)));
  EXPECT_FLOAT_EQ(routed(0.2).weights[0], share);
  EXPECT_FLOAT_EQ(routed(0.2).weights[1], 1 - share);
  EXPECT_EQ(routed(0.2).weights[2], 0);
}

TEST(SoftmaxThresholdRouter, GivenIds_KeepTheirNamesAndWeighAgainstTheBestOfTheRow) {
  MoeSpec spec = sized("softmax_threshold", 4, 2);
  spec.router.options = {{"ratio", 0.2}};
  const RoutingResult result = testing::route(
      RoutingProblem{.spec = spec, .logits = {1.0F, 3.0F, 0.0F, 2.0F}, .given_ids = {2, 3}});
  EXPECT_EQ(result.ids, (Ids{2, 3}));
  EXPECT_EQ(result.weights, (std::vector<float>{0, 1}));
}

TEST(TopAnyRouter, ChoicesAboveTheirThreshold_ShareTheWeight) {
  const MoeSpec spec = sized("top_any", 4, 3);
  const auto routed = [&](const std::vector<float>& thresholds, const Ids& given = {}) {
    std::vector<int32_t> bits;
    for (const float value : thresholds) bits.push_back(std::bit_cast<int32_t>(value));
    return testing::route(RoutingProblem{
        .spec = spec, .logits = {1.0F, 3.0F, 0.0F, 2.0F}, .given_ids = given, .tensors = {bits}});
  };
  EXPECT_EQ(routed({0, 0, 0, 0}).ids, (Ids{1, 3, 0}));
  EXPECT_EQ(routed({0, 4, 0, 0}).ids, (Ids{-1, 3, 0}));
  EXPECT_EQ(routed({0, 4, 0, 0}).weights, (std::vector<float>{0, 0.5F, 0.5F}));
  EXPECT_EQ(routed({1, 3, 0, 2}).ids, (Ids{1, -1, -1}));  // none lies above: the best alone
  EXPECT_EQ(routed({1, 3, 0, 2}).weights, (std::vector<float>{1, 0, 0}));
  EXPECT_EQ(routed({0, 0, 0, 0}, {2, 0, -1}).ids, (Ids{2, 0, -1}));
  EXPECT_EQ(routed({0, 0, 0, 0}, {2, 0, -1}).weights, (std::vector<float>{0, 1, 0}));
}

TEST(TopAnyRouter, ThresholdThatIsNan_IsRefused) {
  const MoeSpec spec = sized("top_any", 2, 1);
  const std::vector<float> values = {0, std::numeric_limits<float>::quiet_NaN()};
  const routing::RouterTensor& tensor = *routing::router_tensors_of(spec).at(0).tensor;
  try {
    tensor.check(spec, {.data = values.data(), .shape = {1, 2}}, 0, "here");
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(error.detail().tensor, "here");
    EXPECT_NE(error.detail().what.find("expert 1"), std::string::npos);
  }
}

MoeSpec simulated(const SimulatedRouting& options, int64_t experts, int64_t top_k) {
  MoeSpec spec = sized("simulated", experts, top_k);
  spec.router.simulated = options;
  validate(spec);
  return spec;
}

RoutingResult draw(const MoeSpec& spec, int64_t tokens, int64_t first_token = 0) {
  return testing::route(
      RoutingProblem{.spec = spec, .tokens_without_logits = tokens, .first_token = first_token});
}

TEST(SimulatedRouter, EachDistribution_GivesDistinctIdsAndEqualWeightsAsTheOracle) {
  for (const auto distribution : {SimulatedDistribution::kUniform, SimulatedDistribution::kNormal,
                                  SimulatedDistribution::kZipf}) {
    for (const int64_t top_k : {1, 3, 10}) {
      const MoeSpec spec = simulated({.distribution = distribution, .seed = 5}, 10, top_k);
      testing::expect_equals_oracle(
          RoutingProblem{.spec = spec, .tokens_without_logits = 70, .first_token = 3});
      const RoutingResult result = draw(spec, 70);
      for (int64_t token = 0; token < 70; ++token) {
        const auto first = result.ids.begin() + token * top_k;
        EXPECT_EQ(std::set<int32_t>(first, first + top_k).size(), static_cast<size_t>(top_k));
      }
      EXPECT_EQ(result.weights[0], 1.0F / static_cast<float>(top_k));
    }
  }
}

TEST(SimulatedRouter, ChunksOfACall_JoinToTheWhole) {
  const MoeSpec spec = simulated({.seed = 9}, 64, 6);
  const RoutingResult whole = draw(spec, 100);
  Ids joined = draw(spec, 33).ids;
  const Ids rest = draw(spec, 67, 33).ids;
  joined.insert(joined.end(), rest.begin(), rest.end());
  EXPECT_EQ(joined, whole.ids);
  EXPECT_NE(draw(simulated({.seed = 10}, 64, 6), 100).ids, whole.ids);
}

TEST(SimulatedRouter, Uniform_LoadsExpertsEvenly) {
  std::map<int32_t, int> load;
  for (const int32_t id : draw(simulated({.seed = 1}, 16, 2), 8000).ids) ++load[id];
  EXPECT_EQ(load.size(), 16U);
  // Each expects 1000; the bar is five standard deviations.
  for (const auto& [id, count] : load) EXPECT_NEAR(count, 1000, 150) << id;
}

TEST(SimulatedRouter, Zipf_FirstChoicesFollowThePowerLaw) {
  const MoeSpec spec = simulated(
      {.distribution = SimulatedDistribution::kZipf, .seed = 2, .zipf_exponent = 1.0}, 8, 1);
  std::map<int32_t, int> load;
  for (const int32_t id : draw(spec, 20000).ids) ++load[id];
  double harmonic = 0;
  for (int rank = 1; rank <= 8; ++rank) harmonic += 1.0 / rank;
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_NEAR(load[rank], 20000 / harmonic / (rank + 1), 350) << rank;
  }
}

TEST(SimulatedRouter, Replay_RepeatsItsRows) {
  const MoeSpec spec = simulated({.distribution = SimulatedDistribution::kReplay,
                                  .replay_ids = {0, 3, 2, -1, 1, 1},
                                  .replay_weights = {1, 2, 3, 4, 5, 6}},
                                 4, 2);
  const RoutingResult result = draw(spec, 4, 2);
  EXPECT_EQ(result.ids, (Ids{1, 1, 0, 3, 2, -1, 1, 1}));
  EXPECT_EQ(result.weights, (std::vector<float>{5, 6, 1, 2, 3, 4, 5, 6}));
}

TEST(RoutingMethod, EveryNameOfVllm_IsAValidRouter) {
  for (const char* name :
       {"Default", "Renormalize", "DeepSeekV3", "Llama4", "RenormalizeNaive", "TopK",
        "SigmoidRenorm", "MiniMax2", "Sigmoid", "DeepseekV4", "Simulated"}) {
    SCOPED_TRACE(name);
    MoeSpec spec = testing::router_spec(8, 2, Renormalize::kNone);
    spec.router = routing_method(name);
    EXPECT_NO_THROW(validate(spec));
    RoutingProblem problem = testing::random_problem(spec, 20, 1.0F, 3);
    testing::expect_equals_oracle(problem);
  }
}

TEST(RoutingMethod, Formulas_AreThoseOfTheName) {
  const auto weights = [](const char* name) {
    MoeSpec spec = testing::router_spec(3, 2, Renormalize::kNone);
    spec.router = routing_method(name);
    RoutingProblem problem = {.spec = spec, .logits = {0.0F, 2.0F, 1.0F}};
    if (spec.router.has_selection_bias) problem.selection_bias = {5.0F, 5.0F, 0.0F};
    return testing::route(problem);
  };
  const double e1 = std::exp(1.0);
  const double e2 = std::exp(2.0);
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  EXPECT_FLOAT_EQ(weights("Default").weights[0], static_cast<float>(e2 / (1 + e1 + e2)));
  EXPECT_FLOAT_EQ(weights("Renormalize").weights[0], static_cast<float>(e2 / (e1 + e2)));
  EXPECT_FLOAT_EQ(weights("RenormalizeNaive").weights[0], static_cast<float>(e2 / (e1 + e2)));
  EXPECT_FLOAT_EQ(weights("Llama4").weights[1], static_cast<float>(sigmoid(1)));
  EXPECT_FLOAT_EQ(weights("Sigmoid").weights[1], static_cast<float>(sigmoid(1)));
  EXPECT_FLOAT_EQ(weights("SigmoidRenorm").weights[1],
                  static_cast<float>(sigmoid(1) / (sigmoid(1) + sigmoid(2))));
  EXPECT_EQ(weights("TopK").weights, (std::vector<float>{2.0F, 1.0F}));
  for (const char* biased : {"DeepSeekV3", "MiniMax2", "DeepseekV4"}) {
    EXPECT_EQ(weights(biased).ids, (Ids{1, 0})) << biased;
  }
  EXPECT_FLOAT_EQ(weights("MiniMax2").weights[1], static_cast<float>(0.5 / (0.5 + sigmoid(2))));
}

TEST(RoutingMethod, UnknownName_ListsTheKnownOnes) {
  try {
    static_cast<void>(routing_method("renormalize"));
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnknownName);
    EXPECT_NE(error.detail().expected.find("DeepSeekV3"), std::string::npos);
    EXPECT_NE(error.detail().expected.find("Simulated"), std::string::npos);
  }
}

}  // namespace
}  // namespace conclave

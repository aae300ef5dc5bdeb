// Replays the routing cases of vLLM's tests (test_routing, test_fused_topk, test_grouped_topk)
// against float64: ids are equal, weights within bar N6 instead of vLLM's 1e-3 to 2e-2.
#include "core/float_convert.h"
#include "routing/routing_problem.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace conclave {
namespace {

using testing::RoutingProblem;
using testing::RoutingResult;

enum class Bias : uint8_t { kNone, kConstant, kRandom };

struct Shape {
  int64_t tokens = 0;
  int64_t hidden = 0;
};

void round_to(DType dtype, std::vector<float>& values) {
  for (float& value : values) {
    if (dtype == DType::kBF16) value = bf16_to_float(float_to_bf16(value));
    if (dtype == DType::kF16) value = f16_to_float(float_to_f16(value));
  }
}

// Logits of a gate [E, K] on hidden rows [M, K], both standard normal over their scale.
std::vector<float> gate_logits(const Shape& shape, int64_t experts, uint32_t seed) {
  const std::vector<float> rows = testing::random_floats(shape.tokens * shape.hidden, 0, 1, seed);
  const std::vector<float> gate = testing::random_floats(
      experts * shape.hidden, 0, 1 / std::sqrt(float(shape.hidden)), seed + 1);
  std::vector<float> logits;
  for (int64_t token = 0; token < shape.tokens; ++token) {
    for (int64_t expert = 0; expert < experts; ++expert) {
      float sum = 0;
      for (int64_t h = 0; h < shape.hidden; ++h) {
        sum += rows[static_cast<size_t>(token * shape.hidden + h)] *
               gate[static_cast<size_t>(expert * shape.hidden + h)];
      }
      logits.push_back(sum);
    }
  }
  return logits;
}

RoutingProblem problem_of(const MoeSpec& spec, std::vector<float> logits, Bias bias) {
  RoutingProblem problem{.spec = spec, .logits = std::move(logits)};
  const auto experts = static_cast<size_t>(spec.num_experts);
  if (bias == Bias::kConstant) problem.selection_bias.assign(experts, 0.9F);
  if (bias == Bias::kRandom) {
    problem.selection_bias = testing::random_floats(spec.num_experts, 0, 1, 77);
  }
  problem.spec.router.has_selection_bias = bias != Bias::kNone;
  validate(problem.spec);
  return problem;
}

Renormalize renormalize_if(bool wanted) { return wanted ? Renormalize::kSum : Renormalize::kNone; }

// (M, K), k, E, renormalise
using RoutingCase = std::tuple<int, int, int, bool>;
constexpr Shape kRoutingShapes[] = {{32, 256}, {64, 512}};

class VllmMatrixRouting : public ::testing::TestWithParam<RoutingCase> {
 protected:
  MoeSpec spec(RouterScore score, double scale = 1.0) const {
    const auto [shape, top_k, experts, renormalize] = GetParam();
    MoeSpec spec = testing::router_spec(experts, top_k, renormalize_if(renormalize));
    spec.router.score = score;
    spec.router.scale = scale;
    return spec;
  }
  std::vector<float> logits() const {
    const auto [shape, top_k, experts, renormalize] = GetParam();
    return gate_logits(kRoutingShapes[shape], experts, static_cast<uint32_t>(shape + 10 * top_k));
  }
};

TEST_P(VllmMatrixRouting, FusedTopk) {
  for (const auto score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
    testing::expect_equals_oracle(problem_of(spec(score), logits(), Bias::kNone));
  }
}

TEST_P(VllmMatrixRouting, FusedTopkBias) {
  for (const auto score :
       {RouterScore::kSoftmax, RouterScore::kSigmoid, RouterScore::kSqrtSoftplus}) {
    for (const double scale : {1.0, 1.1}) {
      for (const Bias bias : {Bias::kConstant, Bias::kRandom}) {
        testing::expect_equals_oracle(problem_of(spec(score, scale), logits(), bias));
      }
    }
  }
}

TEST_P(VllmMatrixRouting, ConstantBias_ChangesNoChoice) {
  const MoeSpec plain = spec(RouterScore::kSigmoid);
  const RoutingResult without = testing::route(problem_of(plain, logits(), Bias::kNone));
  EXPECT_EQ(testing::route(problem_of(plain, logits(), Bias::kConstant)), without);
}

INSTANTIATE_TEST_SUITE_P(All, VllmMatrixRouting,
                         ::testing::Combine(::testing::Values(0, 1), ::testing::Values(2, 4, 6),
                                            ::testing::Values(8, 16, 64), ::testing::Bool()));

// (M, K), k, (E, groups, kept), renormalise, scale 1.0 or 1.1
using GroupedCase = std::tuple<int, int, int, bool, bool>;
class VllmMatrixGroupedRouting : public ::testing::TestWithParam<GroupedCase> {};

TEST_P(VllmMatrixGroupedRouting, SoftmaxAndSigmoid_WithAndWithoutBias) {
  const auto [shape, top_k, grouping, renormalize, scaled] = GetParam();
  const int64_t experts = grouping == 0 ? 64 : 32;
  MoeSpec spec = testing::router_spec(experts, top_k, renormalize_if(renormalize));
  spec.router.num_groups = grouping == 0 ? 8 : 4;
  spec.router.topk_groups = grouping == 0 ? 4 : 2;
  spec.router.scale = scaled ? 1.1 : 1.0;
  const std::vector<float> logits = gate_logits(kRoutingShapes[shape], experts, 5);
  for (const auto score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
    spec.router.score = score;
    for (const Bias bias : {Bias::kNone, Bias::kConstant, Bias::kRandom}) {
      spec.router.group_score = bias == Bias::kNone ? GroupScore::kMax : GroupScore::kTop2Sum;
      testing::expect_equals_oracle(problem_of(spec, logits, bias));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, VllmMatrixGroupedRouting,
                         ::testing::Combine(::testing::Values(0, 1), ::testing::Values(2, 4, 6),
                                            ::testing::Values(0, 1), ::testing::Bool(),
                                            ::testing::Bool()));

// Llama-4 takes the sigmoid of the best logit, which multiplies the expert's input.
TEST(VllmMatrixLlama4, TopOne_WeighsByItsSigmoid) {
  for (const Shape& shape : kRoutingShapes) {
    for (const int64_t experts : {8, 16, 64}) {
      MoeSpec spec = testing::router_spec(experts, 1, Renormalize::kNone);
      spec.router = routing_method("Llama4");
      spec.weight_on = WeightOn::kInput;
      const RoutingProblem problem = problem_of(spec, gate_logits(shape, experts, 3), Bias::kNone);
      testing::expect_equals_oracle(problem);
      const RoutingResult result = testing::route(problem);
      for (size_t token = 0; token < result.ids.size(); ++token) {
        const float* row = problem.logits.data() + token * static_cast<size_t>(experts);
        const double best = double{*std::max_element(row, row + experts)};
        EXPECT_FLOAT_EQ(result.weights[token], static_cast<float>(1 / (1 + std::exp(-best))));
      }
    }
  }
}

// One group has all experts: what vLLM calls degenerate is plain top-k, and keeps its scale.
TEST(VllmMatrixLlama4, OneGroup_IsPlainTopkForEveryScoreAndScale) {
  for (const auto score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
    for (const double scale : {1.0, 1.1}) {
      MoeSpec grouped = testing::router_spec(16, 4, Renormalize::kSum);
      grouped.router.score = score;
      grouped.router.scale = scale;
      const auto logits = gate_logits({32, 256}, 16, 9);
      grouped.router.group_score = GroupScore::kMax;
      testing::expect_equals_oracle(problem_of(grouped, logits, Bias::kNone));
      testing::expect_equals_oracle(problem_of(grouped, logits, Bias::kRandom));
    }
  }
}

// M, E, k, renormalise, type of the logits
using FusedTopkCase = std::tuple<int, int, int, bool, DType>;
class VllmMatrixFusedTopk : public ::testing::TestWithParam<FusedTopkCase> {};

TEST_P(VllmMatrixFusedTopk, SoftmaxAndSigmoid_EqualFloat64) {
  const auto [tokens, experts, top_k, renormalize, dtype] = GetParam();
  for (const int hidden : {1024, 2048}) {
    std::vector<float> logits =
        testing::random_logits(tokens, experts, 1.0F, static_cast<uint32_t>(hidden));
    round_to(dtype, logits);
    for (const auto score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
      MoeSpec spec = testing::router_spec(experts, top_k, renormalize_if(renormalize));
      spec.router.score = score;
      testing::expect_equals_oracle(problem_of(spec, logits, Bias::kNone));
      testing::expect_equals_oracle(problem_of(spec, logits, Bias::kRandom));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, VllmMatrixFusedTopk,
                         ::testing::Combine(::testing::Values(1, 33, 56), ::testing::Values(6, 16),
                                            ::testing::Values(3, 4), ::testing::Bool(),
                                            ::testing::Values(DType::kBF16, DType::kF16,
                                                              DType::kF32)));

// E, score, content of the logits
class VllmMatrixBadLogits : public ::testing::TestWithParam<std::tuple<int, RouterScore, float>> {};

TEST_P(VllmMatrixBadLogits, IdsAreUniqueAndWeightsFinite) {
  const auto [experts, score, bad] = GetParam();
  for (const bool all : {true, false}) {
    for (const bool renormalize : {true, false}) {
      MoeSpec spec = testing::router_spec(experts, 4, renormalize_if(renormalize));
      spec.router.score = score;
      std::vector<float> logits = testing::random_logits(33, experts, 1.0F, 2);
      for (size_t i = 0; i < logits.size(); i += all ? 1 : 3) logits[i] = bad;
      const RoutingProblem problem = problem_of(spec, logits, Bias::kNone);
      testing::expect_equals_oracle(problem);
      const RoutingResult result = testing::route(problem);
      for (size_t row = 0; row < 33; ++row) {
        const auto first = result.ids.begin() + static_cast<std::ptrdiff_t>(4 * row);
        EXPECT_EQ(std::set<int32_t>(first, first + 4).size(), 4U);
      }
      for (const float weight : result.weights) EXPECT_TRUE(std::isfinite(weight));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, VllmMatrixBadLogits,
    ::testing::Combine(::testing::Values(6, 8, 16),
                       ::testing::Values(RouterScore::kSoftmax, RouterScore::kSigmoid),
                       ::testing::Values(std::numeric_limits<float>::quiet_NaN(),
                                         std::numeric_limits<float>::infinity(),
                                         -std::numeric_limits<float>::infinity())));

// M, scale 1 or 2.5, renormalise, type of the logits
class VllmMatrixGroupedTopk
    : public ::testing::TestWithParam<std::tuple<int, double, bool, DType>> {};

TEST_P(VllmMatrixGroupedTopk, EightGroupsOfTwo_EqualFloat64) {
  const auto [tokens, scale, renormalize, dtype] = GetParam();
  std::vector<float> logits = testing::random_logits(tokens, 16, 1.0F, 41);
  round_to(dtype, logits);
  for (const auto score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
    for (const double epsilon : {0.0, 1e-20}) {
      MoeSpec spec = testing::router_spec(16, 2, renormalize_if(renormalize));
      spec.router.score = score;
      spec.router.num_groups = 8;
      spec.router.topk_groups = 2;
      spec.router.scale = scale;
      if (renormalize) spec.router.epsilon = epsilon;
      testing::expect_equals_oracle(problem_of(spec, logits, Bias::kRandom));
      spec.router.group_score = GroupScore::kMax;
      testing::expect_equals_oracle(problem_of(spec, logits, Bias::kNone));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, VllmMatrixGroupedTopk,
                         ::testing::Combine(::testing::Values(1, 33, 64),
                                            ::testing::Values(1.0, 2.5), ::testing::Bool(),
                                            ::testing::Values(DType::kBF16, DType::kF32)));

}  // namespace
}  // namespace conclave

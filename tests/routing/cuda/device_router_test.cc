// Compares routing on the device with the host's router: the same ids, weights within 2 ulp.
#include "routing/cuda/device_router.h"

#include "core/float_convert.h"
#include "routing/cuda/route.h"
#include "routing/random_spec.h"
#include "support/cuda/device_array.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::DeviceArray;
using testing::RoutingProblem;
using testing::RoutingResult;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// Results that the device writes, which must equal those of the host's router and stages.
struct DeviceResult {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<float> identity;
  std::vector<int32_t> captured_ids;
  std::vector<float> captured_weights;
  uint64_t without_finite_logit = 0;
};

struct RouteCall {
  DType logits_dtype = DType::kF32;
  int64_t extra_stride = 0;
  int64_t live = -1;
  std::vector<uint8_t> padding_mask = {};
};

// Rounds the problem's logits to the type, in place; returns the bytes for the device.
std::vector<uint8_t> store_logits(RoutingProblem& problem, const RouteCall& call) {
  const int64_t columns = num_logits(problem.spec);
  const int64_t stride = columns + call.extra_stride;
  std::vector<uint8_t> bytes(
      static_cast<size_t>(problem.num_tokens() * stride * byte_size(call.logits_dtype)), 0xff);
  auto* data = static_cast<void*>(bytes.data());
  for (int64_t i = 0; i < problem.num_tokens() * columns; ++i) {
    const auto at = static_cast<size_t>(i / columns * stride + i % columns);
    float& logit = problem.logits[static_cast<size_t>(i)];
    if (call.logits_dtype == DType::kF32) {
      static_cast<float*>(data)[at] = logit;
    } else if (call.logits_dtype == DType::kF16) {
      static_cast<uint16_t*>(data)[at] = float_to_f16(logit);
      logit = f16_to_float(float_to_f16(logit));
    } else {
      static_cast<uint16_t*>(data)[at] = float_to_bf16(logit);
      logit = bf16_to_float(float_to_bf16(logit));
    }
  }
  return bytes;
}

class DeviceRouter : public testing::DeviceTest {
 protected:
  DeviceResult run(RoutingProblem& problem, const RouteCall& call = {}) {
    const MoeSpec& spec = problem.spec;
    EXPECT_TRUE(routing::device_router_supports(spec)) << testing::describe(spec);
    const DeviceArray<uint8_t> logits(store_logits(problem, call));
    const DeviceArray<float> bias(problem.selection_bias);
    const DeviceArray<float> expert_scale(problem.expert_scale);
    const DeviceArray<float> global_scale(problem.global_scale);
    const DeviceArray<int32_t> given(problem.given_ids);
    const DeviceArray<uint8_t> mask(call.padding_mask);
    const DeviceArray<int64_t> live(std::vector<int64_t>{call.live});
    const DeviceArray<uint64_t> counter(std::vector<uint64_t>{0});
    const auto tokens = static_cast<size_t>(problem.num_tokens());
    const size_t slots = tokens * static_cast<size_t>(spec.top_k);
    const DeviceArray<int32_t> ids(slots);
    const DeviceArray<float> weights(slots);
    const DeviceArray<float> identity(tokens);
    const DeviceArray<int32_t> captured_ids(slots);
    const DeviceArray<float> captured_weights(slots);
    routing::device_route(
        routing::plan_device_route(spec),
        {.logits = logits.data(),
         .logits_dtype = call.logits_dtype,
         .logits_stride = num_logits(spec) + call.extra_stride,
         .num_tokens = problem.num_tokens(),
         .live_tokens = call.live < 0 ? nullptr : live.data(),
         .padding_mask = static_cast<const bool*>(static_cast<void*>(or_null(mask))),
         .selection_bias = or_null(bias),
         .expert_scale = or_null(expert_scale),
         .global_scale = or_null(global_scale),
         .given_ids = or_null(given),
         .topk_ids = ids.data(),
         .topk_weights = weights.data(),
         .identity = identity.data(),
         .captured_ids = captured_ids.data(),
         .captured_weights = captured_weights.data(),
         .tokens_without_finite_logit = counter.data()},
        stream());
    wait();
    for (const auto* array : {&ids, &captured_ids}) array->expect_guard_untouched();
    for (const auto* array : {&weights, &identity, &captured_weights}) {
      array->expect_guard_untouched();
    }
    return {ids.download(),          weights.download(),          identity.download(),
            captured_ids.download(), captured_weights.download(), counter.download()[0]};
  }

  // Compares with the host's router on the same logits.
  void expect_equals_host(RoutingProblem& problem, const RouteCall& call = {}) {
    SCOPED_TRACE(testing::describe(problem.spec));
    const DeviceResult actual = run(problem, call);
    const RoutingResult wanted = testing::route(problem);
    ASSERT_EQ(actual.captured_ids, wanted.ids);
    ASSERT_EQ(actual.without_finite_logit, static_cast<uint64_t>(wanted.without_finite_logit));
    testing::expect_weights(actual.weights, wanted.weights);
    ASSERT_EQ(actual.captured_weights, actual.weights);
    expect_identity(problem.spec, wanted, actual);
  }

  using DrawSpec = MoeSpec (*)(std::mt19937& generator);

  // Logits of every type and stride. `ties`: those of every fifth seed are whole numbers.
  void expect_draws_equal_host(DrawSpec draw, uint32_t seeds, bool ties) {
    const std::vector<DType> types = {DType::kF32, DType::kBF16, DType::kF16};
    for (uint32_t seed = 0; seed < seeds; ++seed) {
      std::mt19937 generator(seed);
      const MoeSpec spec = draw(generator);
      SCOPED_TRACE("seed " + std::to_string(seed));
      const float spread = std::vector<float>{0.05F, 1.0F, 4.0F}[generator() % 3];
      RoutingProblem problem = testing::random_problem(spec, 9, spread, seed);
      const bool cancels =
          spec.router.renormalize == Renormalize::kSum && spec.router.score == RouterScore::kNone;
      const bool tied = ties && seed % 5 == 0;
      for (float& logit : problem.logits) {
        if (tied) logit = std::ceil(logit);
        if (cancels) logit = std::abs(logit) + 0.1F;
      }
      expect_equals_host(problem, {.logits_dtype = types[seed % 3],
                                   .extra_stride = static_cast<int64_t>(seed % 2)});
      if (HasFailure()) return;
    }
  }

  // `empty_row`: the first token has nothing finite.
  void expect_special_values_survive(DrawSpec draw, uint32_t seeds, bool empty_row) {
    const std::vector<float> values = {kNan, kInf, -kInf, 0.0F, -0.0F, 1.0F, -2.0F, 80.0F, -90.0F};
    for (uint32_t seed = 0; seed < seeds; ++seed) {
      std::mt19937 generator(seed);
      MoeSpec spec = draw(generator);
      const bool grows = spec.router.score == RouterScore::kNone ||
                         spec.router.score == RouterScore::kSqrtSoftplus;
      // These scores give +Inf the weight +Inf if nothing divides by it.
      if (grows) spec.router.score = RouterScore::kSigmoid;
      SCOPED_TRACE("seed " + std::to_string(seed));
      RoutingProblem problem = testing::random_problem(spec, 9, 1.0F, seed);
      for (float& logit : problem.logits) logit = values[generator() % values.size()];
      if (empty_row) {
        std::fill_n(problem.logits.begin(), num_logits(spec), seed % 2 == 0 ? kNan : -kInf);
      }
      expect_equals_host(problem);
      if (HasFailure()) return;
    }
  }

 private:
  static void expect_identity(const MoeSpec& spec, const RoutingResult& wanted,
                              const DeviceResult& actual) {
    const auto top_k = static_cast<size_t>(spec.top_k);
    for (size_t token = 0; token < actual.identity.size(); ++token) {
      float identity = 0;
      for (size_t at = token * top_k; at < (token + 1) * top_k; ++at) {
        const bool zero_expert = wanted.ids[at] >= spec.num_experts;
        if (zero_expert) identity += actual.weights[at];
        ASSERT_EQ(actual.ids[at], zero_expert ? -1 : wanted.ids[at]) << "at " << at;
      }
      ASSERT_EQ(actual.identity[token], identity) << "token " << token;
    }
  }
};

TEST_F(DeviceRouter, RandomSpecs_EqualTheHost) {
  expect_draws_equal_host(testing::random_topk_spec, 900, false);
}

TEST_F(DeviceRouter, RandomSpecs_SurviveSpecialValues) {
  expect_special_values_survive(testing::random_topk_spec, 500, false);
}

TEST_F(DeviceRouter, MoreSlotsThanLanes_EqualTheHost) {
  expect_draws_equal_host(testing::random_wide_topk_spec, 400, true);
}

TEST_F(DeviceRouter, MoreSlotsThanLanes_SurviveSpecialValues) {
  expect_special_values_survive(testing::random_wide_topk_spec, 200, true);
}

TEST_F(DeviceRouter, MoreSlotsThanLanes_WeighGivenIds) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 generator(seed);
    const MoeSpec spec = testing::random_wide_topk_spec(generator);
    const bool cancels =
        spec.router.renormalize == Renormalize::kSum && spec.router.score == RouterScore::kNone;
    if (cancels) continue;
    RoutingProblem problem = testing::random_problem(spec, 6, 1.0F, seed);
    const auto columns = static_cast<uint32_t>(num_logits(spec));
    for (int64_t i = 0; i < 6 * spec.top_k; ++i) {
      problem.given_ids.push_back(static_cast<int32_t>(generator() % (columns + 1)) - 1);
    }
    std::fill_n(problem.logits.begin(), columns, kNan);
    SCOPED_TRACE("seed " + std::to_string(seed));
    expect_equals_host(problem);
    if (HasFailure()) return;
  }
}

TEST_F(DeviceRouter, MoreSlotsThanLanes_PaddingChoosesNothing) {
  for (const int64_t top_k : {33, 60}) {
    const MoeSpec spec = testing::router_spec(60, top_k, Renormalize::kSum);
    RoutingProblem problem = testing::random_problem(spec, 257, 1.0F, 5);
    RouteCall call{.live = 200, .padding_mask = std::vector<uint8_t>(257, 1)};
    for (size_t t = 0; t < 257; t += 7) call.padding_mask[t] = 0;
    std::fill_n(problem.logits.begin() + 7 * 60, 60, kNan);
    const DeviceResult result = run(problem, call);
    const RoutingResult wanted = testing::route(problem);
    EXPECT_EQ(result.without_finite_logit, 0U);
    for (size_t at = 0; at < result.ids.size(); ++at) {
      const size_t token = at / static_cast<size_t>(top_k);
      const bool counts = token < 200 && call.padding_mask[token] != 0;
      ASSERT_EQ(result.ids[at], counts ? wanted.ids[at] : -1) << "at " << at;
      ASSERT_EQ(result.captured_ids[at], result.ids[at]);
      if (!counts) {
        ASSERT_EQ(result.weights[at], 0.0F);
      }
    }
  }
}

// Covers every number of columns per lane, with and without groups.
TEST_F(DeviceRouter, ManyExperts_EqualTheHost) {
  for (const int64_t experts :
       {1, 2, 6, 10, 31, 32, 33, 60, 64, 65, 128, 160, 256, 384, 512, 1024}) {
    for (const int64_t top_k : {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{5}, int64_t{8},
                                int64_t{32}, int64_t{33}, int64_t{64}, experts}) {
      if (top_k > experts) continue;
      MoeSpec spec = testing::router_spec(experts, top_k, Renormalize::kSum);
      RoutingProblem plain = testing::random_problem(spec, 5, 1.0F, 7);
      expect_equals_host(plain);
      spec.router.renormalize = Renormalize::kNone;
      RoutingProblem softmax = testing::random_problem(spec, 5, 1.0F, 8);
      expect_equals_host(softmax);
      spec.router.score = RouterScore::kSigmoid;
      spec.router.has_selection_bias = true;
      RoutingProblem biased = testing::random_problem(spec, 5, 1.0F, 9);
      expect_equals_host(biased);
      if (HasFailure()) return;
    }
  }
}

TEST_F(DeviceRouter, GroupsOfManySizes_EqualTheHost) {
  for (const auto& [experts, groups, kept] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{
           {256, 8, 4}, {160, 8, 3}, {1024, 512, 40}, {1024, 2, 1}, {66, 33, 9}, {96, 3, 2}}) {
    for (const auto score : {GroupScore::kMax, GroupScore::kTop2Sum}) {
      for (const auto mask : {GroupMask::kNegInf, GroupMask::kZero}) {
        for (const int64_t top_k : {int64_t{8}, kept * (experts / groups)}) {
          MoeSpec spec = testing::router_spec(experts, top_k, Renormalize::kSum);
          spec.router.score = RouterScore::kSigmoid;
          spec.router.has_selection_bias = true;
          spec.router.num_groups = groups;
          spec.router.topk_groups = kept;
          spec.router.group_score = score;
          spec.router.group_mask = mask;
          RoutingProblem problem = testing::random_problem(spec, 17, 1.0F, 3);
          expect_equals_host(problem);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Some rows consist of pairs that float32 cannot tell apart, in any order; in the others all
// experts are that close.
TEST_F(DeviceRouter, ScoresCloserThanFloat32_AreOrderedAsInDouble) {
  const std::vector<RouterScore> scores = {RouterScore::kSoftmax, RouterScore::kSigmoid,
                                           RouterScore::kSqrtSoftplus, RouterScore::kNone};
  for (uint32_t seed = 0; seed < 96; ++seed) {
    std::mt19937 generator(seed);
    const int64_t experts = std::vector<int64_t>{16, 64, 256, 384}[seed / 4 % 4];
    MoeSpec spec =
        testing::router_spec(experts, 1 + static_cast<int64_t>(generator() % 8), Renormalize::kSum);
    spec.router.score = scores[seed % 4];
    spec.router.has_selection_bias = true;
    spec.router.epsilon = 1e-20;
    if (seed % 3 == 0) {
      spec.router.num_groups = 8;
      spec.router.topk_groups = 4;
    }
    RoutingProblem problem = testing::random_problem(spec, 64, 1.0F, seed);
    for (int64_t i = 0; i < 64 * experts; ++i) {
      const bool pairs = i / experts % 2 == 0;
      const auto step = static_cast<float>(pairs ? generator() % 64 / 2 : 0);
      problem.logits[static_cast<size_t>(i)] =
          1.0F + 0.01F * step + 1.2e-7F * static_cast<float>(generator() % 4);
    }
    // Biases are equal or a few units in the last place apart.
    for (float& bias : problem.selection_bias) {
      bias = seed % 2 == 0 ? 0.25F : 0.25F + 3e-8F * static_cast<float>(generator() % 3);
    }
    SCOPED_TRACE("seed " + std::to_string(seed));
    expect_equals_host(problem);
    if (HasFailure()) return;
  }
}

// One score is a little above or below the middle between two numbers of the type. It rounds to the
// nearer one, and its float32 neighbour, which is the middle, would round to the even one.
TEST_F(DeviceRouter, ScoresBesideAMiddle_AreRoundedOnce) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const double step = dtype == DType::kBF16 ? 0x1p-8 : 0x1p-11;  // between numbers above 1/2
    MoeSpec spec = testing::router_spec(2, 1, Renormalize::kNone);
    spec.router.score = RouterScore::kSigmoid;
    spec.router.score_dtype = dtype;
    const auto logit_of = [](double score) { return std::log(score / (1 - score)); };
    // A quarter of the difference of logits is that of scores: 2^-26, half of what float32 tells.
    const auto above = static_cast<float>(logit_of(0.5 + 0.5 * step) + 0x1p-24);
    const auto below = static_cast<float>(logit_of(0.5 + 1.5 * step) - 0x1p-24);
    const auto lower = static_cast<float>(logit_of(0.5 + step));
    RoutingProblem problem{.spec = spec, .logits = {0.0F, above, lower, below}};
    EXPECT_EQ(run(problem).ids, (std::vector<int32_t>{1, 0}));
    expect_equals_host(problem);
  }
}

TEST_F(DeviceRouter, InfiniteScores_ShareByTheNormThatDivides) {
  for (const auto score : {RouterScore::kNone, RouterScore::kSqrtSoftplus}) {
    for (const double p : {0.5, 1.0, 2.0}) {
      for (const auto renormalize : {Renormalize::kSum, Renormalize::kPNorm}) {
        if (renormalize == Renormalize::kSum && p != 1.0) continue;
        MoeSpec spec = testing::router_spec(6, 5, renormalize);
        spec.router.score = score;
        spec.router.renormalize_p = p;
        RoutingProblem problem{
            .spec = spec,
            .logits = {kInf, 0.0F, kInf, kInf, 1.0F, kInf, 2.0F, kInf, 0.0F, 0.0F, kInf, 1.0F}};
        expect_equals_host(problem);
      }
    }
  }
}

TEST_F(DeviceRouter, SumsOfZero_DivideNothing) {
  for (const auto renormalize : {Renormalize::kSum, Renormalize::kPNorm}) {
    MoeSpec spec = testing::router_spec(3, 2, renormalize);
    spec.router.score = RouterScore::kNone;
    // Two scores cancel in the first row, and are 0 in the second.
    RoutingProblem problem{.spec = spec, .logits = {-3.0F, 1.5F, -1.5F, 0.0F, -1.0F, 0.0F}};
    expect_equals_host(problem);
    if (renormalize == Renormalize::kSum) {
      EXPECT_EQ(run(problem).weights, (std::vector<float>{1.5F, -1.5F, 0.0F, 0.0F}));
    }
  }
}

TEST_F(DeviceRouter, AllColumnsChosen_EqualTheHost) {
  MoeSpec spec = testing::router_spec(30, 32, Renormalize::kSum);
  spec.num_zero_experts = 2;
  RoutingProblem problem = testing::random_problem(spec, 40, 2.0F, 11);
  expect_equals_host(problem);
}

TEST_F(DeviceRouter, TiedLogits_GoToTheLowerIds) {
  const MoeSpec spec = testing::router_spec(256, 8, Renormalize::kSum);
  RoutingProblem problem{.spec = spec, .logits = std::vector<float>(256 * 3, 0.25F)};
  const DeviceResult result = run(problem);
  for (size_t at = 0; at < result.ids.size(); ++at) {
    EXPECT_EQ(result.ids[at], static_cast<int32_t>(at % 8));
    EXPECT_EQ(result.weights[at], 0.125F);
  }
}

TEST_F(DeviceRouter, GivenIds_AreWeighedAsTheHostWeighsThem) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 generator(seed);
    const MoeSpec spec = testing::random_topk_spec(generator);
    const bool cancels =
        spec.router.renormalize == Renormalize::kSum && spec.router.score == RouterScore::kNone;
    if (cancels) continue;
    RoutingProblem problem = testing::random_problem(spec, 6, 1.0F, seed);
    const auto columns = static_cast<uint32_t>(num_logits(spec));
    for (int64_t i = 0; i < 6 * spec.top_k; ++i) {
      problem.given_ids.push_back(static_cast<int32_t>(generator() % (columns + 1)) - 1);
    }
    SCOPED_TRACE("seed " + std::to_string(seed));
    expect_equals_host(problem);
    if (HasFailure()) return;
  }
}

TEST_F(DeviceRouter, PaddingAndTokensBeyondLive_ChooseNothing) {
  const MoeSpec spec = testing::router_spec(60, 4, Renormalize::kSum);
  RoutingProblem problem = testing::random_problem(spec, 257, 1.0F, 5);
  RouteCall call{.live = 200, .padding_mask = std::vector<uint8_t>(257, 1)};
  for (size_t t = 0; t < 257; t += 7) call.padding_mask[t] = 0;
  // This token does not count, like padding.
  std::fill_n(problem.logits.begin() + 7 * 60, 60, kNan);
  const DeviceResult result = run(problem, call);
  const RoutingResult wanted = testing::route(problem);
  EXPECT_EQ(result.without_finite_logit, 0U);
  for (size_t at = 0; at < result.ids.size(); ++at) {
    const size_t token = at / 4;
    const bool counts = token < 200 && call.padding_mask[token] != 0;
    ASSERT_EQ(result.ids[at], counts ? wanted.ids[at] : -1) << "at " << at;
    ASSERT_EQ(result.captured_ids[at], result.ids[at]);
    if (!counts) {
      ASSERT_EQ(result.weights[at], 0.0F);
    }
  }
}

TEST_F(DeviceRouter, NoTokens_IsAnOrdinaryCall) {
  RoutingProblem problem{.spec = testing::router_spec(8, 2, Renormalize::kSum)};
  EXPECT_TRUE(run(problem).ids.empty());
}

TEST(DeviceRouterSupport, OtherRoutersAndSizes_SayWhy) {
  MoeSpec spec = testing::router_spec(1025, 2, Renormalize::kSum);
  EXPECT_FALSE(routing::device_router_supports(spec));
  spec = testing::router_spec(1000, 1000, Renormalize::kSum);
  EXPECT_TRUE(routing::device_router_supports(spec));
  spec.num_zero_experts = 25;
  EXPECT_FALSE(routing::device_router_supports(spec));
  spec = testing::router_spec(64, 2, Renormalize::kSum);
  spec.router.name = "of_the_application";
  EXPECT_FALSE(routing::device_router_supports(spec));
  EXPECT_TRUE(routing::device_router_supports(testing::spec_of_row("sparse_mixer")));
}

}  // namespace
}  // namespace conclave

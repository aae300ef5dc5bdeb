// Each wrong or meaningless field of RouterSpec is named by its error.
#include "conclave/error.h"
#include "conclave/spec.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace conclave {
namespace {

MoeSpec spec_of(const std::string& router) {
  MoeSpec spec;
  spec.num_experts = 8;
  spec.top_k = 2;
  spec.hidden_size = 8;
  spec.intermediate_size = 6;
  spec.router.name = router;
  if (router == "hash") spec.router.vocab_size = 10;
  if (router == "sink_softmax") {
    spec.shared = {.mode = SharedMode::kRouterWeight, .intermediate_size = 6, .count = 2};
  }
  return spec;
}

struct Case {
  const char* named;  // what the message must contain
  std::function<void(MoeSpec&)> change;
};

void expect_each_named(const std::string& router, const std::vector<Case>& cases) {
  EXPECT_NO_THROW(validate(spec_of(router))) << router;
  for (const Case& wrong : cases) {
    MoeSpec spec = spec_of(router);
    wrong.change(spec);
    try {
      validate(spec);
      ADD_FAILURE() << router << ": accepted, though " << wrong.named << " is wrong";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(wrong.named), std::string::npos)
          << router << ": " << error.what();
      EXPECT_FALSE(error.detail().found.empty()) << error.what();
    }
  }
}

TEST(RouterSpec, NumbersOutOfRange_AreNamed) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const char* router : {"topk", "an application's own"}) {
    expect_each_named(
        router,
        {{"soft_cap", [](MoeSpec& s) { s.router.soft_cap = -1; }},
         {"soft_cap", [](MoeSpec& s) { s.router.soft_cap = kNan; }},
         {"epsilon", [](MoeSpec& s) { s.router.epsilon = -1e-20; }},
         {"scale", [](MoeSpec& s) { s.router.scale = kInf; }},
         {"jitter_epsilon", [](MoeSpec& s) { s.router.jitter_epsilon = -0.5; }},
         {"input_norm.epsilon", [](MoeSpec& s) { s.router.input_norm.epsilon = kNan; }},
         {"logits_dtype", [](MoeSpec& s) { s.router.logits_dtype = DType::kF64; }},
         {"score_dtype", [](MoeSpec& s) { s.router.score_dtype = DType::kI32; }},
         {"score", [](MoeSpec& s) { s.router.score = static_cast<RouterScore>(9); }},
         {"renormalize", [](MoeSpec& s) { s.router.renormalize = static_cast<Renormalize>(9); }},
         {"vocab_size", [](MoeSpec& s) { s.router.vocab_size = -1; }},
         {"num_groups", [](MoeSpec& s) { s.router.num_groups = 0; }},
         {"num_groups", [](MoeSpec& s) { s.router.num_groups = 3; }},
         {"topk_groups", [](MoeSpec& s) { s.router.topk_groups = 2; }},
         {"renormalize_p", [](MoeSpec& s) { s.router.renormalize_p = 2; }},
         {"renormalize_p",
          [](MoeSpec& s) {
            s.router.renormalize = Renormalize::kPNorm;
            s.router.renormalize_p = 0;
          }},
         {"epsilon",
          [](MoeSpec& s) {
            s.router.renormalize = Renormalize::kNone;
            s.router.epsilon = 1e-20;
          }},
         {"has_logit_bias",
          [](MoeSpec& s) {
            s.has_gate = false;
            s.router.has_logit_bias = true;
          }},
         {"input_norm.enabled", [](MoeSpec& s) {
            s.has_gate = false;
            s.router.input_norm.enabled = true;
          }}});
  }
}

TEST(RouterSpec, SmallValues_AreShownAsTheyAre) {
  MoeSpec spec = spec_of("topk");
  spec.router.renormalize = Renormalize::kNone;
  spec.router.epsilon = 1e-20;
  try {
    validate(spec);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.detail().found, "1e-20");
  }
}

TEST(RouterSpec, Groups_MustHoldEnoughExperts) {
  const auto grouped = [](int64_t groups, int64_t kept, int64_t top_k) {
    return [=](MoeSpec& s) {
      s.router.num_groups = groups;
      s.router.topk_groups = kept;
      s.top_k = top_k;
    };
  };
  expect_each_named("topk", {{"top_k", grouped(4, 1, 3)},
                             {"top_k", grouped(2, 1, 5)},
                             {"kTop2Sum", grouped(8, 4, 2)},
                             {"zero experts", [&](MoeSpec& s) {
                                grouped(4, 2, 2)(s);
                                s.num_zero_experts = 2;
                              }}});
  MoeSpec spec = spec_of("topk");
  grouped(4, 2, 4)(spec);
  EXPECT_NO_THROW(validate(spec));
}

TEST(RouterSpec, FieldsThatARuleDoesNotRead_MustKeepTheirDefaults) {
  const Case jitter = {"jitter_epsilon", [](MoeSpec& s) { s.router.jitter_epsilon = 0.01; }};
  const Case vocab = {"vocab_size", [](MoeSpec& s) { s.router.vocab_size = 10; }};
  const Case replay = {"replay", [](MoeSpec& s) { s.router.simulated.replay_ids = {0, 1}; }};
  const Case zipf = {"distribution", [](MoeSpec& s) {
                       s.router.simulated.distribution = SimulatedDistribution::kZipf;
                     }};
  const Case seed = {"simulated.seed", [](MoeSpec& s) { s.router.simulated.seed = 7; }};
  const Case exponent = {"zipf_exponent", [](MoeSpec& s) { s.router.simulated.zipf_exponent = 2; }};
  const Case bias = {"has_selection_bias", [](MoeSpec& s) { s.router.has_selection_bias = true; }};
  const Case groups = {"num_groups", [](MoeSpec& s) { s.router.num_groups = 4; }};
  const Case cap = {"soft_cap", [](MoeSpec& s) { s.router.soft_cap = 30; }};
  const Case epsilon = {"epsilon", [](MoeSpec& s) { s.router.epsilon = 1e-20; }};
  const Case scale = {"scale", [](MoeSpec& s) { s.router.scale = 2; }};
  const Case own = {"has_expert_scale", [](MoeSpec& s) { s.router.has_expert_scale = true; }};
  const Case zero = {"num_zero_experts", [](MoeSpec& s) { s.num_zero_experts = 1; }};
  const Case score = {"score", [](MoeSpec& s) { s.router.score = RouterScore::kSqrtSoftplus; }};
  const Case p_norm = {"renormalize",
                       [](MoeSpec& s) { s.router.renormalize = Renormalize::kPNorm; }};
  expect_each_named("topk", {jitter, vocab, replay, zipf, seed, exponent});
  expect_each_named("hash", {jitter, replay, zipf, seed, exponent, bias, groups, zero});
  expect_each_named("sparse_mixer",
                    {vocab, replay, bias, groups, cap, epsilon, scale, own, zero, score, p_norm});
  expect_each_named("softmax_threshold", {jitter, vocab, replay, zipf, bias, groups, cap, epsilon,
                                          scale, own, zero, score, p_norm});
  expect_each_named("top_any", {jitter, vocab, replay, zipf, bias, groups, cap, epsilon, scale, own,
                                zero, score, p_norm});
  expect_each_named("sink_softmax",
                    {jitter, vocab, replay, groups, cap, epsilon, own, zero, score, p_norm});
  expect_each_named("simulated",
                    {jitter, vocab, bias, groups, cap, epsilon, scale, own, zero, score, p_norm});
}

TEST(RouterSpec, OptionsThatTheRouterDoesNotKnow_AreNamed) {
  const auto option = [](const char* name, double value) {
    return [=](MoeSpec& s) { s.router.options = {{name, value}}; };
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const char* router : {"topk", "hash", "sparse_mixer", "sink_softmax", "simulated"}) {
    expect_each_named(router, {{"options[ratio]", option("ratio", 0.5)}});
  }
  expect_each_named("an application's own", {{"options[ratio]", option("ratio", nan)}});
  MoeSpec own = spec_of("an application's own");
  option("ratio", -7)(own);
  EXPECT_NO_THROW(validate(own));
}

TEST(RouterSpec, RulesWithNeedsOfTheirOwn_SayThem) {
  expect_each_named("sparse_mixer", {{"top_k", [](MoeSpec& s) { s.top_k = 3; }}});
  expect_each_named("hash", {{"vocab_size", [](MoeSpec& s) { s.router.vocab_size = 0; }}});
  const auto ratio = [](double value) {
    return [=](MoeSpec& s) { s.router.options = {{"ratio", value}}; };
  };
  expect_each_named("softmax_threshold",
                    {{"options[ratio]", ratio(0)}, {"options[ratio]", ratio(1.5)}});
  expect_each_named("sink_softmax",
                    {{"kRouterWeight", [](MoeSpec& s) { s.shared = SharedExpertSpec{}; }}});
  const auto replay = [](std::vector<int32_t> ids, std::vector<float> weights) {
    return [=](MoeSpec& s) {
      s.router.simulated = {.distribution = SimulatedDistribution::kReplay,
                            .replay_ids = ids,
                            .replay_weights = weights};
    };
  };
  expect_each_named("simulated",
                    {{"replay_ids", replay({}, {})},
                     {"replay_ids", replay({0, 1, 2}, {})},
                     {"replay_ids[1]", replay({0, 8}, {})},
                     {"replay_ids[0]", replay({-2, 0}, {})},
                     {"replay_weights", replay({0, 1}, {1.0F})},
                     {"replay_weights",
                      [](MoeSpec& s) {
                        s.router.simulated.replay_weights = {1.0F, 0.0F};
                      }},
                     {"zipf_exponent", [](MoeSpec& s) { s.router.simulated.zipf_exponent = -1; }}});
}

}  // namespace
}  // namespace conclave

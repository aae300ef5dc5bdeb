// If two ranks differ in one field that describes their layer, each gets the error that names it.
// Otherwise they would add up parts of different layers.
#include "layer/rank_agreement.h"

#include "support/thread_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace conclave {
namespace {

using testing::RankOutcome;
using Names = std::vector<std::string_view>;

// Each function below unpacks one aggregate: a member that is added later stops the build here
// until it has a name in the list and a case, or a reason in kNotCompared.
Names members_of(const MoeSpec& spec) {
  [[maybe_unused]] const auto& [experts, top_k, hidden, inner, dtype, quant, router, activation,
                                shared, has_gate, has_bias, has_output_bias, num_zero, weight_on,
                                output_scale, latent, residual] = spec;
  return {"num_experts",      "top_k",     "hidden_size", "intermediate_size",
          "weight_dtype",     "has_gate",  "has_bias",    "has_output_bias",
          "num_zero_experts", "weight_on", "output_scale"};
}
Names members_of(const QuantSpec& quant) {
  [[maybe_unused]] const auto& [weights, rows, cols, activations, group, row_type, power_of_two,
                                signed_scales, zeros, global_scale, column_order, column_factors] =
      quant;
  return {"quant.weights",
          "quant.block_rows",
          "quant.block_cols",
          "quant.activations",
          "quant.activation_group",
          "quant.activation_dtype",
          "quant.power_of_two_scales",
          "quant.signed_scales",
          "quant.zeros",
          "quant.has_global_scale",
          "quant.has_column_order",
          "quant.has_column_factors"};
}
Names members_of(const RouterSpec& router) {
  [[maybe_unused]] const auto& [name, score, order, logit_bias, soft_cap, selection_bias, groups,
                                topk_groups, group_score, group_mask, renormalize, renormalize_p,
                                epsilon, epsilon_mode, scale, expert_scale, global_scale, jitter,
                                vocab, simulated, norm, logits_dtype, score_dtype, options] =
      router;
  [[maybe_unused]] const auto& [enabled, norm_epsilon] = norm;
  return {"router.name",
          "router.score",
          "router.order",
          "router.has_logit_bias",
          "router.soft_cap",
          "router.has_selection_bias",
          "router.num_groups",
          "router.topk_groups",
          "router.group_score",
          "router.group_mask",
          "router.renormalize",
          "router.renormalize_p",
          "router.epsilon",
          "router.epsilon_mode",
          "router.scale",
          "router.has_expert_scale",
          "router.has_global_scale",
          "router.jitter_epsilon",
          "router.vocab_size",
          "router.simulated",
          "router.input_norm.enabled",
          "router.input_norm.epsilon",
          "router.logits_dtype",
          "router.score_dtype",
          "router.options"};
}
Names members_of(const ActivationSpec& activation) {
  [[maybe_unused]] const auto& [name, limit, alpha, beta, linear_beta] = activation;
  return {"activation.name",
          "activation.limit",
          "activation.alpha",
          "activation.beta",
          "activation.linear_beta",
          "shared.activation.name",
          "shared.activation.limit",
          "shared.activation.alpha",
          "shared.activation.beta",
          "shared.activation.linear_beta",
          "residual.activation.name",
          "residual.activation.limit",
          "residual.activation.alpha",
          "residual.activation.beta",
          "residual.activation.linear_beta"};
}
Names members_of(const SharedExpertSpec& shared) {
  [[maybe_unused]] const auto& [mode, size, count, activation, bias, slot_weight, dtype] = shared;
  return {"shared.mode",     "shared.intermediate_size", "shared.count",
          "shared.has_bias", "shared.slot_weight",       "shared.weight_dtype"};
}
Names members_of(const LatentSpec& latent, const ResidualMlpSpec& residual) {
  [[maybe_unused]] const auto& [latent_size, has_norm, norm_epsilon] = latent;
  [[maybe_unused]] const auto& [size, activation, dtype] = residual;
  return {"latent.size", "latent.has_norm", "latent.norm_epsilon", "residual.intermediate_size",
          "residual.weight_dtype"};
}
Names members_of(const LayerOptions& options) {
  [[maybe_unused]] const auto& [max_tokens, id_policy, kernel, arithmetic, transport, ep_combine,
                                chunk_order, determinism, tuning] = options;
  return {"options.max_tokens",  "options.id_policy",   "options.kernel",
          "options.arithmetic",  "options.transport",   "options.ep_combine",
          "options.chunk_order", "options.determinism", "options.tuning"};
}
Names members_of(const ParallelSpec& parallel) {
  [[maybe_unused]] const auto& [ep_size, ep_rank, placement, rank_of, redundant, replica_of,
                                tp_size, tp_rank, reduce] = parallel;
  return {"parallel.ep_size", "parallel.ep_rank",    "parallel.placement",
          "parallel.rank_of", "parallel.replica_of", "parallel.num_redundant_experts",
          "parallel.tp_size", "parallel.tp_rank",    "parallel.reduce"};
}

struct NotCompared {
  std::string_view name;
  const char* why;
};
constexpr std::array kNotCompared = {
    NotCompared{"has_gate", "a rank may have its logits from elsewhere"},
    NotCompared{"router.simulated", "ranks with tokens of their own may draw on their own"},
    NotCompared{"options.kernel", "kernels of one arithmetic have the same bits"},
    NotCompared{"options.arithmetic", "what the plan made of it is compared"},
    NotCompared{"options.determinism", "it is a promise about this rank's kernels"},
    NotCompared{"options.tuning", "it changes no bit"},
    NotCompared{"parallel.tp_rank", "it differs inside a tensor group"}};

struct Case {
  std::string_view name;   // name of the member
  std::string_view field;  // its name in the message
  void (*change)(LayerPlan& plan);
};

const std::vector<Case> kCases = {
    {"num_experts", "num_experts", [](LayerPlan& p) { p.spec.num_experts = 9; }},
    {"top_k", "top_k", [](LayerPlan& p) { p.spec.top_k = 3; }},
    {"hidden_size", "hidden_size", [](LayerPlan& p) { p.spec.hidden_size = 17; }},
    {"intermediate_size", "intermediate_size", [](LayerPlan& p) { p.spec.intermediate_size = 17; }},
    {"weight_dtype", "weight_dtype", [](LayerPlan& p) { p.spec.weight_dtype = DType::kF16; }},
    {"has_bias", "how parts", [](LayerPlan& p) { p.spec.has_bias = true; }},
    {"has_output_bias", "how parts", [](LayerPlan& p) { p.spec.has_output_bias = true; }},
    {"num_zero_experts", "num_zero_experts", [](LayerPlan& p) { p.spec.num_zero_experts = 1; }},
    {"weight_on", "how parts", [](LayerPlan& p) { p.spec.weight_on = WeightOn::kInput; }},
    {"output_scale", "how parts", [](LayerPlan& p) { p.spec.output_scale = 1.5; }},

    {"quant.weights", "quant", [](LayerPlan& p) { p.spec.quant.weights = WeightScale::kBlock; }},
    {"quant.block_rows", "quant", [](LayerPlan& p) { p.spec.quant.block_rows = 64; }},
    {"quant.block_cols", "quant", [](LayerPlan& p) { p.spec.quant.block_cols = 64; }},
    {"quant.activations", "quant",
     [](LayerPlan& p) { p.spec.quant.activations = ActivationScale::kToken; }},
    {"quant.activation_group", "quant", [](LayerPlan& p) { p.spec.quant.activation_group = 64; }},
    {"quant.activation_dtype", "quant",
     [](LayerPlan& p) { p.spec.quant.activation_dtype = DType::kI8; }},
    {"quant.power_of_two_scales", "quant",
     [](LayerPlan& p) { p.spec.quant.power_of_two_scales = true; }},
    {"quant.signed_scales", "quant", [](LayerPlan& p) { p.spec.quant.signed_scales = true; }},
    {"quant.zeros", "quant", [](LayerPlan& p) { p.spec.quant.zeros = WeightZero::kPoint; }},
    {"quant.has_global_scale", "quant", [](LayerPlan& p) { p.spec.quant.has_global_scale = true; }},
    {"quant.has_column_order", "quant", [](LayerPlan& p) { p.spec.quant.has_column_order = true; }},
    {"quant.has_column_factors", "quant",
     [](LayerPlan& p) { p.spec.quant.has_column_factors = true; }},

    {"router.name", "router", [](LayerPlan& p) { p.spec.router.name = "hash"; }},
    {"router.score", "router", [](LayerPlan& p) { p.spec.router.score = RouterScore::kSigmoid; }},
    {"router.order", "router",
     [](LayerPlan& p) { p.spec.router.order = RouterOrder::kTopkThenScore; }},
    {"router.has_logit_bias", "router", [](LayerPlan& p) { p.spec.router.has_logit_bias = true; }},
    {"router.soft_cap", "router", [](LayerPlan& p) { p.spec.router.soft_cap = 30; }},
    {"router.has_selection_bias", "router",
     [](LayerPlan& p) { p.spec.router.has_selection_bias = true; }},
    {"router.num_groups", "router", [](LayerPlan& p) { p.spec.router.num_groups = 2; }},
    {"router.topk_groups", "router", [](LayerPlan& p) { p.spec.router.topk_groups = 2; }},
    {"router.group_score", "router",
     [](LayerPlan& p) { p.spec.router.group_score = GroupScore::kMax; }},
    {"router.group_mask", "router",
     [](LayerPlan& p) { p.spec.router.group_mask = GroupMask::kZero; }},
    {"router.renormalize", "router",
     [](LayerPlan& p) { p.spec.router.renormalize = Renormalize::kNone; }},
    {"router.renormalize_p", "router", [](LayerPlan& p) { p.spec.router.renormalize_p = 2; }},
    {"router.epsilon", "router", [](LayerPlan& p) { p.spec.router.epsilon = 1e-20; }},
    {"router.epsilon_mode", "router",
     [](LayerPlan& p) { p.spec.router.epsilon_mode = EpsilonMode::kClampMin; }},
    {"router.scale", "router", [](LayerPlan& p) { p.spec.router.scale = 2.5; }},
    {"router.has_expert_scale", "router",
     [](LayerPlan& p) { p.spec.router.has_expert_scale = true; }},
    {"router.has_global_scale", "router",
     [](LayerPlan& p) { p.spec.router.has_global_scale = true; }},
    {"router.jitter_epsilon", "router", [](LayerPlan& p) { p.spec.router.jitter_epsilon = 0.01; }},
    {"router.vocab_size", "router", [](LayerPlan& p) { p.spec.router.vocab_size = 64; }},
    {"router.input_norm.enabled", "router",
     [](LayerPlan& p) { p.spec.router.input_norm.enabled = true; }},
    {"router.input_norm.epsilon", "router",
     [](LayerPlan& p) { p.spec.router.input_norm.epsilon = 1e-5; }},
    {"router.logits_dtype", "router",
     [](LayerPlan& p) { p.spec.router.logits_dtype = DType::kBF16; }},
    {"router.score_dtype", "router",
     [](LayerPlan& p) { p.spec.router.score_dtype = DType::kBF16; }},
    {"router.options", "router",
     [](LayerPlan& p) {
       p.spec.router.options = {{"ratio", 0.5}};
     }},

    {"activation.name", "the activation", [](LayerPlan& p) { p.spec.activation.name = "gelu"; }},
    {"activation.limit", "the activation", [](LayerPlan& p) { p.spec.activation.limit = 7; }},
    {"activation.alpha", "the activation", [](LayerPlan& p) { p.spec.activation.alpha = 1.7; }},
    {"activation.beta", "the activation", [](LayerPlan& p) { p.spec.activation.beta = 1; }},
    {"activation.linear_beta", "the activation",
     [](LayerPlan& p) { p.spec.activation.linear_beta = 25; }},
    {"shared.activation.name", "the activation",
     [](LayerPlan& p) { p.spec.shared.activation.name = "gelu"; }},
    {"shared.activation.limit", "the activation",
     [](LayerPlan& p) { p.spec.shared.activation.limit = 7; }},
    {"shared.activation.alpha", "the activation",
     [](LayerPlan& p) { p.spec.shared.activation.alpha = 1.7; }},
    {"shared.activation.beta", "the activation",
     [](LayerPlan& p) { p.spec.shared.activation.beta = 1; }},
    {"shared.activation.linear_beta", "the activation",
     [](LayerPlan& p) { p.spec.shared.activation.linear_beta = 25; }},
    {"residual.activation.name", "the activation",
     [](LayerPlan& p) { p.spec.residual.activation.name = "gelu"; }},
    {"residual.activation.limit", "the activation",
     [](LayerPlan& p) { p.spec.residual.activation.limit = 7; }},
    {"residual.activation.alpha", "the activation",
     [](LayerPlan& p) { p.spec.residual.activation.alpha = 1.7; }},
    {"residual.activation.beta", "the activation",
     [](LayerPlan& p) { p.spec.residual.activation.beta = 1; }},
    {"residual.activation.linear_beta", "the activation",
     [](LayerPlan& p) { p.spec.residual.activation.linear_beta = 25; }},

    {"shared.mode", "shared.mode", [](LayerPlan& p) { p.spec.shared.mode = SharedMode::kAdd; }},
    {"shared.intermediate_size", "shared.intermediate_size",
     [](LayerPlan& p) { p.spec.shared.intermediate_size = 8; }},
    {"shared.count", "shared.count", [](LayerPlan& p) { p.spec.shared.count = 2; }},
    {"shared.has_bias", "how parts", [](LayerPlan& p) { p.spec.shared.has_bias = true; }},
    {"shared.slot_weight", "how parts", [](LayerPlan& p) { p.spec.shared.slot_weight = 0.5; }},
    {"shared.weight_dtype", "shared.weight_dtype",
     [](LayerPlan& p) { p.spec.shared.weight_dtype = DType::kF32; }},
    {"latent.size", "latent.size", [](LayerPlan& p) { p.spec.latent.size = 8; }},
    {"latent.has_norm", "how parts", [](LayerPlan& p) { p.spec.latent.has_norm = true; }},
    {"latent.norm_epsilon", "how parts", [](LayerPlan& p) { p.spec.latent.norm_epsilon = 1e-5; }},
    {"residual.intermediate_size", "residual.intermediate_size",
     [](LayerPlan& p) { p.spec.residual.intermediate_size = 8; }},
    {"residual.weight_dtype", "residual.weight_dtype",
     [](LayerPlan& p) { p.spec.residual.weight_dtype = DType::kF32; }},

    {"options.max_tokens", "max_tokens", [](LayerPlan& p) { p.options.max_tokens = 8; }},
    {"options.id_policy", "id_policy", [](LayerPlan& p) { p.options.id_policy = IdPolicy::kSkip; }},
    {"options.transport", "transport",
     [](LayerPlan& p) { p.options.transport = EpTransport::kFixedSlots; }},
    {"options.ep_combine", "ep_combine",
     [](LayerPlan& p) { p.options.ep_combine = EpCombine::kReducedPerRank; }},
    {"options.chunk_order", "chunk_order",
     [](LayerPlan& p) { p.options.chunk_order = ChunkOrder::kByTwos; }},
    {"plan.arithmetic", "arithmetic",
     [](LayerPlan& p) { p.arithmetic = cpu::Arithmetic::kDpBf16; }},
    {"parallel.ep_size", "ep_size", [](LayerPlan& p) { p.parallel.ep_size = 2; }},
    {"parallel.ep_rank", "the rank in the other group",
     [](LayerPlan& p) { p.parallel.ep_rank = 1; }},
    {"parallel.placement", "placement",
     [](LayerPlan& p) { p.parallel.placement = PlacementStrategy::kRoundRobin; }},
    {"parallel.rank_of", "rank_of or replica_of", [](LayerPlan& p) { p.parallel.rank_of = {0}; }},
    {"parallel.replica_of", "rank_of or replica_of",
     [](LayerPlan& p) { p.parallel.replica_of = {0}; }},
    {"parallel.num_redundant_experts", "num_redundant_experts",
     [](LayerPlan& p) { p.parallel.num_redundant_experts = 1; }},
    {"parallel.tp_size", "tp_size", [](LayerPlan& p) { p.parallel.tp_size = 4; }},
    {"parallel.reduce", "reduce", [](LayerPlan& p) { p.parallel.reduce = Reduce::kPartial; }},
};

LayerPlan plan_of(Communicator& tensor_communicator) {
  LayerPlan plan;
  plan.spec.num_experts = 8;
  plan.spec.top_k = 2;
  plan.spec.hidden_size = 16;
  plan.spec.intermediate_size = 16;
  plan.parallel.tp_size = 2;
  plan.part.tensor_communicator = &tensor_communicator;
  return plan;
}

using Group = std::vector<std::unique_ptr<Communicator>>;
Group two_ranks() {
  return make_local_group({.num_ranks = 2, .timeout = std::chrono::seconds(60)});
}

TEST(RankAgreement, EqualRanks_Agree) {
  const auto outcomes = testing::run_ranks(two_ranks(), [](int32_t rank, Communicator& comm) {
    LayerPlan plan = plan_of(comm);
    plan.parallel.tp_rank = rank;
    check_ranks_agree(plan, own_agreed_values(plan), nullptr);
  });
  EXPECT_EQ(testing::first_failure(outcomes), "");
}

TEST(RankAgreement, OneFieldThatDiffers_IsAMismatchNamingIt) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(std::string(c.name));
    const auto outcomes = testing::run_ranks(two_ranks(), [&](int32_t rank, Communicator& comm) {
      LayerPlan plan = plan_of(comm);
      if (rank == 1) c.change(plan);
      // A token group of one rank compares nothing, so the error must come from the tensor group.
      Group alone = make_local_group({.num_ranks = 1});
      check_ranks_agree(plan, own_agreed_values(plan), alone.front().get());
    });
    for (size_t rank = 0; rank < 2; ++rank) {
      const RankOutcome& outcome = outcomes[rank];
      ASSERT_TRUE(outcome.code) << "rank " << rank << " went on";
      EXPECT_EQ(*outcome.code, ErrorCode::kCommMismatch) << outcome.message;
      EXPECT_EQ(outcome.peer, rank == 0 ? 1 : 0);
      EXPECT_NE(outcome.message.find("ranks differ in "), std::string::npos) << outcome.message;
      EXPECT_NE(outcome.message.find(c.field), std::string::npos) << outcome.message;
    }
  }
}

// The group that exchanges tokens compares the same fields, and the rank in the other group.
TEST(RankAgreement, RanksThatExchangeTokens_AreComparedToo) {
  const auto run = [](void (*change)(LayerPlan& plan)) {
    return testing::run_ranks(two_ranks(), [&](int32_t rank, Communicator& comm) {
      LayerPlan plan = plan_of(comm);
      plan.part.tensor_communicator = nullptr;
      plan.parallel = {.ep_size = 2, .ep_rank = rank};
      if (rank == 1) change(plan);
      check_ranks_agree(plan, own_agreed_values(plan), &comm);
    });
  };
  EXPECT_EQ(testing::first_failure(run([](LayerPlan&) {})), "");
  for (const RankOutcome& outcome : run([](LayerPlan& p) { p.spec.router.epsilon = 1; })) {
    EXPECT_EQ(outcome.code, ErrorCode::kCommMismatch) << outcome.message;
  }
  for (const RankOutcome& outcome : run([](LayerPlan& p) { p.parallel.tp_rank = 1; })) {
    EXPECT_EQ(outcome.code, ErrorCode::kCommMismatch) << outcome.message;
    EXPECT_NE(outcome.message.find("the rank in the other group"), std::string::npos);
  }
}

// Any engine may list its values: a rank that lists others is told apart before any is compared.
TEST(RankAgreement, RanksThatListOtherValues_AreTold) {
  const std::vector<AgreedValue> usual = {{"tiles", 3}, {"rungs", 5}};
  const std::vector<std::vector<AgreedValue>> others = {
      {{"tiles", 3}}, {{"rungs", 5}, {"tiles", 3}}, {}, {{"tiles", 3}, {"rungs", 5}, {"more", 1}}};
  for (const std::vector<AgreedValue>& other : others) {
    const auto outcomes = testing::run_ranks(two_ranks(), [&](int32_t rank, Communicator& comm) {
      compare_values(rank == 1 ? other : usual, comm);
    });
    for (const RankOutcome& outcome : outcomes) {
      ASSERT_EQ(outcome.code, ErrorCode::kCommMismatch) << outcome.message;
      EXPECT_NE(outcome.message.find("they compare"), std::string::npos) << outcome.message;
    }
  }
}

TEST(RankAgreement, ListsOfAnyEngine_AreComparedByName) {
  const auto run = [](int64_t rungs) {
    return testing::run_ranks(two_ranks(), [&](int32_t rank, Communicator& comm) {
      const LayerPlan plan;
      std::vector<AgreedValue> values = values_to_agree(plan.spec, plan.options, plan.parallel);
      values.push_back({"rungs", rank == 1 ? rungs : 5});
      compare_values(values, comm);
    });
  };
  EXPECT_EQ(testing::first_failure(run(5)), "");
  for (const RankOutcome& outcome : run(6)) {
    EXPECT_EQ(outcome.code, ErrorCode::kCommMismatch);
    EXPECT_NE(outcome.message.find("ranks differ in rungs"), std::string::npos) << outcome.message;
  }
}

TEST(RankAgreement, EveryMember_HasACaseOrAReason) {
  std::set<std::string_view> members;
  const MoeSpec spec;
  for (const Names& names : {members_of(spec), members_of(spec.quant), members_of(spec.router),
                             members_of(spec.activation), members_of(spec.shared),
                             members_of(spec.latent, spec.residual), members_of(LayerOptions{}),
                             members_of(ParallelSpec{})}) {
    members.insert(names.begin(), names.end());
  }
  for (const NotCompared& without : kNotCompared) {
    EXPECT_EQ(members.erase(without.name), 1U) << without.name;
  }
  for (const Case& c : kCases) {
    if (c.name == "plan.arithmetic") continue;
    EXPECT_EQ(members.erase(c.name), 1U) << c.name;
  }
  for (const std::string_view forgotten : members) ADD_FAILURE() << forgotten << " has no case";
}

}  // namespace
}  // namespace conclave

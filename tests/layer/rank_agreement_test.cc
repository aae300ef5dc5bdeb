// If two ranks differ in one field that describes their layer, each gets the error that names it.
// Otherwise they would add up parts of different layers.
#include "layer/rank_agreement.h"

#include "core/spec_fields.h"
#include "support/thread_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave {
namespace {

using testing::RankOutcome;
struct Case {
  std::string name;  // the member, as the message names it
  void (*change)(LayerPlan& plan);
};

const std::vector<Case> kCases = {
    {"num_experts", [](LayerPlan& p) { p.spec.num_experts = 9; }},
    {"top_k", [](LayerPlan& p) { p.spec.top_k = 3; }},
    {"hidden_size", [](LayerPlan& p) { p.spec.hidden_size = 17; }},
    {"intermediate_size", [](LayerPlan& p) { p.spec.intermediate_size = 17; }},
    {"weight_dtype", [](LayerPlan& p) { p.spec.weight_dtype = DType::kF16; }},
    {"has_bias", [](LayerPlan& p) { p.spec.has_bias = true; }},
    {"has_output_bias", [](LayerPlan& p) { p.spec.has_output_bias = true; }},
    {"num_zero_experts", [](LayerPlan& p) { p.spec.num_zero_experts = 1; }},
    {"weight_on", [](LayerPlan& p) { p.spec.weight_on = WeightOn::kInput; }},
    {"output_scale", [](LayerPlan& p) { p.spec.output_scale = 1.5; }},

    {"quant.weights", [](LayerPlan& p) { p.spec.quant.weights = WeightScale::kBlock; }},
    {"quant.block_rows", [](LayerPlan& p) { p.spec.quant.block_rows = 64; }},
    {"quant.block_cols", [](LayerPlan& p) { p.spec.quant.block_cols = 64; }},
    {"quant.activations", [](LayerPlan& p) { p.spec.quant.activations = ActivationScale::kToken; }},
    {"quant.activation_group", [](LayerPlan& p) { p.spec.quant.activation_group = 64; }},
    {"quant.activation_dtype", [](LayerPlan& p) { p.spec.quant.activation_dtype = DType::kI8; }},
    {"quant.activation_scale_rule",
     [](LayerPlan& p) { p.spec.quant.activation_scale_rule = RowScaleRule::kEvenPower; }},
    {"quant.power_of_two_scales", [](LayerPlan& p) { p.spec.quant.power_of_two_scales = true; }},
    {"quant.signed_scales", [](LayerPlan& p) { p.spec.quant.signed_scales = true; }},
    {"quant.scale_values", [](LayerPlan& p) { p.spec.quant.scale_values = ScaleValues::kF16; }},
    {"quant.zero_values", [](LayerPlan& p) { p.spec.quant.zero_values = ScaleValues::kF16; }},
    {"quant.zeros", [](LayerPlan& p) { p.spec.quant.zeros = WeightZero::kPoint; }},
    {"quant.has_global_scale", [](LayerPlan& p) { p.spec.quant.has_global_scale = true; }},
    {"quant.has_column_order", [](LayerPlan& p) { p.spec.quant.has_column_order = true; }},
    {"quant.has_column_factors", [](LayerPlan& p) { p.spec.quant.has_column_factors = true; }},
    {"quant.gate_up_codes.dtype",
     [](LayerPlan& p) { p.spec.quant.gate_up_codes.dtype = DType::kI4; }},
    {"quant.gate_up_codes.block_cols",
     [](LayerPlan& p) { p.spec.quant.gate_up_codes.block_cols = 256; }},
    {"quant.gate_up_codes.has_zeros",
     [](LayerPlan& p) { p.spec.quant.gate_up_codes.has_zeros = false; }},
    {"quant.gate_up_codes.scale_values",
     [](LayerPlan& p) { p.spec.quant.gate_up_codes.scale_values = ScaleValues::kF16; }},
    {"quant.gate_up_codes.zero_values",
     [](LayerPlan& p) { p.spec.quant.gate_up_codes.zero_values = ScaleValues::kF16; }},
    {"quant.down_codes.dtype", [](LayerPlan& p) { p.spec.quant.down_codes.dtype = DType::kI4; }},
    {"quant.down_codes.block_cols", [](LayerPlan& p) { p.spec.quant.down_codes.block_cols = 256; }},
    {"quant.down_codes.has_zeros", [](LayerPlan& p) { p.spec.quant.down_codes.has_zeros = false; }},
    {"quant.down_codes.scale_values",
     [](LayerPlan& p) { p.spec.quant.down_codes.scale_values = ScaleValues::kF16; }},
    {"quant.down_codes.zero_values",
     [](LayerPlan& p) { p.spec.quant.down_codes.zero_values = ScaleValues::kF16; }},

    {"router.name", [](LayerPlan& p) { p.spec.router.name = "hash"; }},
    {"router.score", [](LayerPlan& p) { p.spec.router.score = RouterScore::kSigmoid; }},
    {"router.order", [](LayerPlan& p) { p.spec.router.order = RouterOrder::kTopkThenScore; }},
    {"router.has_logit_bias", [](LayerPlan& p) { p.spec.router.has_logit_bias = true; }},
    {"router.soft_cap", [](LayerPlan& p) { p.spec.router.soft_cap = 30; }},
    {"router.has_selection_bias", [](LayerPlan& p) { p.spec.router.has_selection_bias = true; }},
    {"router.num_groups", [](LayerPlan& p) { p.spec.router.num_groups = 2; }},
    {"router.topk_groups", [](LayerPlan& p) { p.spec.router.topk_groups = 2; }},
    {"router.group_score", [](LayerPlan& p) { p.spec.router.group_score = GroupScore::kMax; }},
    {"router.group_mask", [](LayerPlan& p) { p.spec.router.group_mask = GroupMask::kZero; }},
    {"router.renormalize", [](LayerPlan& p) { p.spec.router.renormalize = Renormalize::kNone; }},
    {"router.renormalize_p", [](LayerPlan& p) { p.spec.router.renormalize_p = 2; }},
    {"router.epsilon", [](LayerPlan& p) { p.spec.router.epsilon = 1e-20; }},
    {"router.epsilon_mode",
     [](LayerPlan& p) { p.spec.router.epsilon_mode = EpsilonMode::kClampMin; }},
    {"router.scale", [](LayerPlan& p) { p.spec.router.scale = 2.5; }},
    {"router.has_expert_scale", [](LayerPlan& p) { p.spec.router.has_expert_scale = true; }},
    {"router.has_global_scale", [](LayerPlan& p) { p.spec.router.has_global_scale = true; }},
    {"router.jitter_epsilon", [](LayerPlan& p) { p.spec.router.jitter_epsilon = 0.01; }},
    {"router.vocab_size", [](LayerPlan& p) { p.spec.router.vocab_size = 64; }},
    {"router.input_norm.enabled", [](LayerPlan& p) { p.spec.router.input_norm.enabled = true; }},
    {"router.input_norm.epsilon", [](LayerPlan& p) { p.spec.router.input_norm.epsilon = 1e-5; }},
    {"router.logits_dtype", [](LayerPlan& p) { p.spec.router.logits_dtype = DType::kBF16; }},
    {"router.score_dtype", [](LayerPlan& p) { p.spec.router.score_dtype = DType::kBF16; }},
    {"router.options",
     [](LayerPlan& p) {
       p.spec.router.options = {{"ratio", 0.5}};
     }},

    {"activation.name", [](LayerPlan& p) { p.spec.activation.name = "gelu"; }},
    {"activation.limit", [](LayerPlan& p) { p.spec.activation.limit = 7; }},
    {"activation.alpha", [](LayerPlan& p) { p.spec.activation.alpha = 1.7; }},
    {"activation.beta", [](LayerPlan& p) { p.spec.activation.beta = 1; }},
    {"activation.linear_beta", [](LayerPlan& p) { p.spec.activation.linear_beta = 25; }},
    {"shared.activation.name", [](LayerPlan& p) { p.spec.shared.activation.name = "gelu"; }},
    {"shared.activation.limit", [](LayerPlan& p) { p.spec.shared.activation.limit = 7; }},
    {"shared.activation.alpha", [](LayerPlan& p) { p.spec.shared.activation.alpha = 1.7; }},
    {"shared.activation.beta", [](LayerPlan& p) { p.spec.shared.activation.beta = 1; }},
    {"shared.activation.linear_beta",
     [](LayerPlan& p) { p.spec.shared.activation.linear_beta = 25; }},
    {"residual.activation.name", [](LayerPlan& p) { p.spec.residual.activation.name = "gelu"; }},
    {"residual.activation.limit", [](LayerPlan& p) { p.spec.residual.activation.limit = 7; }},
    {"residual.activation.alpha", [](LayerPlan& p) { p.spec.residual.activation.alpha = 1.7; }},
    {"residual.activation.beta", [](LayerPlan& p) { p.spec.residual.activation.beta = 1; }},
    {"residual.activation.linear_beta",
     [](LayerPlan& p) { p.spec.residual.activation.linear_beta = 25; }},

    {"shared.mode", [](LayerPlan& p) { p.spec.shared.mode = SharedMode::kAdd; }},
    {"shared.intermediate_size", [](LayerPlan& p) { p.spec.shared.intermediate_size = 8; }},
    {"shared.count", [](LayerPlan& p) { p.spec.shared.count = 2; }},
    {"shared.has_bias", [](LayerPlan& p) { p.spec.shared.has_bias = true; }},
    {"shared.slot_weight", [](LayerPlan& p) { p.spec.shared.slot_weight = 0.5; }},
    {"shared.weight_dtype", [](LayerPlan& p) { p.spec.shared.weight_dtype = DType::kF32; }},
    {"latent.size", [](LayerPlan& p) { p.spec.latent.size = 8; }},
    {"latent.has_norm", [](LayerPlan& p) { p.spec.latent.has_norm = true; }},
    {"latent.norm_epsilon", [](LayerPlan& p) { p.spec.latent.norm_epsilon = 1e-5; }},
    {"residual.intermediate_size", [](LayerPlan& p) { p.spec.residual.intermediate_size = 8; }},
    {"residual.weight_dtype", [](LayerPlan& p) { p.spec.residual.weight_dtype = DType::kF32; }},

    {"options.max_tokens", [](LayerPlan& p) { p.options.max_tokens = 8; }},
    {"options.id_policy", [](LayerPlan& p) { p.options.id_policy = IdPolicy::kSkip; }},
    {"options.transport", [](LayerPlan& p) { p.options.transport = EpTransport::kFixedSlots; }},
    {"options.ep_combine", [](LayerPlan& p) { p.options.ep_combine = EpCombine::kReducedPerRank; }},
    {"options.chunk_order", [](LayerPlan& p) { p.options.chunk_order = ChunkOrder::kByTwos; }},
    {"options.micro_batch_tokens", [](LayerPlan& p) { p.options.micro_batch_tokens = 8; }},
    {"options.spare_experts", [](LayerPlan& p) { p.options.spare_experts = 1; }},
    {"options.max_adapter_rank", [](LayerPlan& p) { p.options.max_adapter_rank = 1; }},
    {"arithmetic", [](LayerPlan& p) { p.arithmetic = cpu::Arithmetic::kDpBf16; }},
    {"parallel.ep_size", [](LayerPlan& p) { p.parallel.ep_size = 2; }},
    {"the rank in the other group", [](LayerPlan& p) { p.parallel.ep_rank = 1; }},
    {"parallel.placement",
     [](LayerPlan& p) { p.parallel.placement = PlacementStrategy::kRoundRobin; }},
    {"parallel.rank_of", [](LayerPlan& p) { p.parallel.rank_of = {0}; }},
    {"parallel.replica_of", [](LayerPlan& p) { p.parallel.replica_of = {0}; }},
    {"parallel.num_redundant_experts", [](LayerPlan& p) { p.parallel.num_redundant_experts = 1; }},
    {"parallel.tp_size", [](LayerPlan& p) { p.parallel.tp_size = 4; }},
    {"parallel.reduce", [](LayerPlan& p) { p.parallel.reduce = Reduce::kPartial; }},
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
    SCOPED_TRACE(c.name);
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
      EXPECT_NE(outcome.message.find("ranks differ in " + c.name + ":"), std::string::npos)
          << outcome.message;
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

// Ranks whose rows gather on devices say this; with the numbers of a call they say nothing.
TEST(RankAgreement, RanksWhoseRowsGather_TellTokensAndCompareRefits) {
  constexpr std::array<int64_t, 2> kTokens = {5, 0};
  const auto run = [&](std::array<uint64_t, 2> refits, std::span<const int64_t> given) {
    return testing::run_ranks(two_ranks(), [&, refits, given](int32_t rank, Communicator& comm) {
      LayerPlan plan = plan_of(comm);
      plan.parallel = {.ep_size = 2, .ep_rank = rank};
      plan.options.max_tokens = 2;
      plan.part.tensor_communicator = nullptr;
      plan.part.expert_communicator = &comm;
      const auto own = static_cast<size_t>(rank);
      const EpochOffer offer{.current = std::make_shared<const PlacementEpoch>(), .next = nullptr};
      const CallAgreement agreed =
          agree_on_call({.tokens = kTokens[own], .refit_epoch = refits[own], .rank_tokens = given},
                        offer, plan, &comm);
      EXPECT_EQ(agreed.chunks, 3);
      ASSERT_EQ(agreed.tokens.ranks(), 2);
      for (int32_t other = 0; other < 2; ++other) {
        EXPECT_EQ(agreed.tokens[other], kTokens[static_cast<size_t>(other)]);
      }
    });
  };
  EXPECT_EQ(testing::first_failure(run({7, 7}, {})), "");
  for (const RankOutcome& outcome : run({7, 9}, {})) {
    EXPECT_EQ(outcome.code, ErrorCode::kCommMismatch) << outcome.message;
    EXPECT_NE(outcome.message.find("refit epochs 7 to 9"), std::string::npos) << outcome.message;
    EXPECT_GE(outcome.peer, 0) << outcome.message;
  }
  EXPECT_EQ(testing::first_failure(run({7, 9}, kTokens)), "");
}

// What each rank of three offers to a call of ranks whose rows gather, and what became of it.
struct GatheringCall {
  std::array<int64_t, 3> adapters = {7, 7, 7};
  std::array<bool, 3> names = {};
  bool are_compared = true;
  bool has_numbers = false;
};
struct GatheringOutcome {
  std::vector<RankOutcome> ranks;
  std::array<bool, 3> names_adapters = {};
};
GatheringOutcome run_gathering(const GatheringCall& call) {
  static constexpr std::array<int64_t, 3> kTokens = {5, 0, 2};
  GatheringOutcome outcome;
  outcome.ranks = testing::run_ranks(make_local_group({.num_ranks = 3}), [&](int32_t rank,
                                                                             Communicator& comm) {
    LayerPlan plan = plan_of(comm);
    plan.parallel = {.ep_size = 3, .ep_rank = rank};
    plan.part.tensor_communicator = nullptr;
    plan.part.expert_communicator = &comm;
    const auto own = static_cast<size_t>(rank);
    const EpochOffer offer{.current = std::make_shared<const PlacementEpoch>(), .next = nullptr};
    CallOffer given{.tokens = kTokens[own],
                    .adapters = call.adapters[own],
                    .adapters_are_compared = call.are_compared,
                    .names_adapters = call.names[own]};
    if (call.has_numbers) given.rank_tokens = kTokens;
    const CallAgreement agreed = agree_on_call(given, offer, plan, &comm);
    EXPECT_TRUE(std::ranges::equal(agreed.tokens.all(), kTokens));
    outcome.names_adapters[own] = agreed.names_adapters;
  });
  return outcome;
}

constexpr std::array<bool, 3> kNone = {};
constexpr std::array<bool, 3> kAll = {true, true, true};

// The numbers of tokens save a question only as long as nothing has changed.
TEST(RankAgreement, RanksWhoseRowsGather_CompareAdaptersThatHaveChanged) {
  for (const bool has_numbers : {false, true}) {
    const GatheringCall alike{.are_compared = false, .has_numbers = has_numbers};
    EXPECT_EQ(testing::first_failure(run_gathering(alike).ranks), "");
    const GatheringCall other{
        .adapters = {7, 7, 9}, .are_compared = false, .has_numbers = has_numbers};
    const std::vector<RankOutcome> outcomes = run_gathering(other).ranks;
    for (size_t rank = 0; rank < outcomes.size(); ++rank) {
      EXPECT_EQ(outcomes[rank].code, ErrorCode::kCommMismatch) << outcomes[rank].message;
      EXPECT_EQ(outcomes[rank].peer, rank == 2 ? 0 : 2) << outcomes[rank].message;
      EXPECT_NE(outcomes[rank].message.find("other adapters"), std::string::npos)
          << outcomes[rank].message;
    }
  }
  // Nobody asks: the caller of another list would have been told by the call before.
  const GatheringCall unasked{.adapters = {7, 7, 9}, .has_numbers = true};
  EXPECT_EQ(testing::first_failure(run_gathering(unasked).ranks), "");
}

TEST(RankAgreement, RanksWhoseRowsGather_RunAdaptersWhereOneNamesSome) {
  EXPECT_EQ(run_gathering({}).names_adapters, kNone);
  EXPECT_EQ(run_gathering({.names = {false, true, false}}).names_adapters, kAll);
  // Any row of ranks that tell nothing may have one.
  EXPECT_EQ(run_gathering({.has_numbers = true}).names_adapters, kAll);
  const GatheringCall asked{.are_compared = false, .has_numbers = true};
  EXPECT_EQ(run_gathering(asked).names_adapters, kNone);
}

TEST(RankAgreement, RanksThatSendRows_RunAdaptersWhereOneNamesSome) {
  const auto run = [](std::array<bool, 2> names, bool expected) {
    return testing::run_ranks(two_ranks(), [&](int32_t rank, Communicator& comm) {
      LayerPlan plan = plan_of(comm);
      plan.parallel = {.ep_size = 2, .ep_rank = rank};
      plan.part.tensor_communicator = nullptr;
      const EpochOffer offer{.current = std::make_shared<const PlacementEpoch>(), .next = nullptr};
      const CallOffer call{.tokens = 1, .names_adapters = names[static_cast<size_t>(rank)]};
      EXPECT_EQ(agree_on_call(call, offer, plan, &comm).names_adapters, expected);
    });
  };
  EXPECT_EQ(testing::first_failure(run({false, false}, false)), "");
  EXPECT_EQ(testing::first_failure(run({true, false}, true)), "");
}

// Slices whose sums meet on devices ask each other nothing, but when adapters have changed.
TEST(RankAgreement, SlicesThatAskNobody_CompareAdaptersThatHaveChanged) {
  const auto run = [](std::array<int64_t, 2> adapters, bool are_compared) {
    return testing::run_ranks(two_ranks(), [&](int32_t rank, Communicator& comm) {
      LayerPlan plan = plan_of(comm);
      plan.part.asks_ranks = false;
      const EpochOffer offer{.current = std::make_shared<const PlacementEpoch>(), .next = nullptr};
      const CallOffer call{.tokens = 1,
                           .adapters = adapters[static_cast<size_t>(rank)],
                           .adapters_are_compared = are_compared};
      EXPECT_EQ(agree_on_call(call, offer, plan, nullptr).chunks, 1);
    });
  };
  EXPECT_EQ(testing::first_failure(run({7, 7}, false)), "");
  EXPECT_EQ(testing::first_failure(run({7, 9}, true)), "");
  const std::vector<RankOutcome> outcomes = run({7, 9}, false);
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_EQ(outcomes[rank].code, ErrorCode::kCommMismatch) << outcomes[rank].message;
    EXPECT_EQ(outcomes[rank].peer, 1 - static_cast<int32_t>(rank)) << outcomes[rank].message;
  }
}

// The least that is ready on all of them is what they take up, and what they have where nobody
// asks.
TEST(RankAgreement, RanksWhoseRowsGather_TakeUpTheEpochThatAllHaveReady) {
  const auto numbered = [](uint64_t number) {
    auto epoch = std::make_shared<PlacementEpoch>();
    epoch->number = number;
    return epoch;
  };
  constexpr std::array<int64_t, 2> kTokens = {1, 1};
  // The epoch of each rank, and whether the next one is ready there.
  const auto run = [&](std::array<uint64_t, 2> current, std::array<bool, 2> ready, bool asks,
                       uint64_t expected) {
    return testing::run_ranks(two_ranks(), [&](int32_t rank, Communicator& comm) {
      LayerPlan plan = plan_of(comm);
      plan.parallel = {.ep_size = 2, .ep_rank = rank};
      plan.part.tensor_communicator = nullptr;
      plan.part.expert_communicator = &comm;
      const auto own = static_cast<size_t>(rank);
      const EpochOffer offer{.current = numbered(current[own]),
                             .next = ready[own] ? numbered(current[own] + 1) : nullptr};
      const std::span<const int64_t> given =
          asks ? std::span<const int64_t>() : std::span<const int64_t>(kTokens);
      EXPECT_EQ(agree_on_call({.tokens = 1, .rank_tokens = given}, offer, plan, &comm).epoch,
                expected);
    });
  };
  EXPECT_EQ(testing::first_failure(run({4, 4}, {true, true}, true, 5)), "");
  EXPECT_EQ(testing::first_failure(run({4, 4}, {true, false}, true, 4)), "");
  EXPECT_EQ(testing::first_failure(run({4, 4}, {false, false}, true, 4)), "");
  EXPECT_EQ(testing::first_failure(run({4, 4}, {true, true}, false, 4)), "");
  for (const RankOutcome& outcome : run({4, 5}, {true, false}, true, 5)) {
    EXPECT_EQ(outcome.code, ErrorCode::kCommMismatch) << outcome.message;
    EXPECT_NE(outcome.message.find("placement epochs 4 to 5"), std::string::npos)
        << outcome.message;
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

// A type that is unset on one rank and named on another is the same type.
TEST(RankAgreement, UnsetTypes_EqualTheOnesThatServe) {
  const auto outcomes = testing::run_ranks(two_ranks(), [](int32_t rank, Communicator& comm) {
    LayerPlan plan = plan_of(comm);
    if (rank == 1) {
      plan.spec.shared.weight_dtype = plan.spec.weight_dtype;
      plan.spec.residual.weight_dtype = plan.spec.weight_dtype;
      plan.spec.quant.activation_dtype = plan.spec.weight_dtype;
    }
    check_ranks_agree(plan, own_agreed_values(plan), nullptr);
  });
  EXPECT_EQ(testing::first_failure(outcomes), "");
}

std::vector<std::string> all_members() {
  std::vector<std::string> names;
  const auto add = [&names](const std::string& name, const auto&) { names.push_back(name); };
  for_each_field(MoeSpec{}, "", add);
  for_each_field(LayerOptions{}, "options.", add);
  for_each_field(ParallelSpec{}, "parallel.", add);
  return names;
}

// A member that is added to one of the structs does not compile until core/spec_fields.h lists it,
// and fails here until it has a case above or a reason beside the comparison.
TEST(RankAgreement, EveryMember_IsComparedWithACase_OrHasAReason) {
  std::set<std::string> without_case;
  for (const AgreedValue& value : values_to_agree({}, {}, {})) without_case.insert(value.name);
  std::set<std::string> unused_reasons;
  for (const FieldNotCompared& without : fields_not_compared()) {
    unused_reasons.emplace(without.name);
    EXPECT_NE(std::string_view(without.why), "") << without.name;
  }
  for (const std::string& name : all_members()) {
    if (without_case.contains(name)) continue;
    const auto reasons = fields_not_compared();
    const auto reason = std::ranges::find_if(reasons, [&](const FieldNotCompared& without) {
      return name == without.name || name.starts_with(std::string(without.name) + ".");
    });
    ASSERT_NE(reason, reasons.end()) << name << " is not compared";
    unused_reasons.erase(std::string(reason->name));
  }
  for (const Case& c : kCases) {
    if (c.name == "arithmetic" || c.name == "the rank in the other group") continue;
    EXPECT_EQ(without_case.erase(c.name), 1U) << c.name;
  }
  for (const std::string& name : without_case) ADD_FAILURE() << name << " has no case";
  for (const std::string& name : unused_reasons) ADD_FAILURE() << name << " is no member";
}

}  // namespace
}  // namespace conclave

// Replicas change where an expert runs, but no bit of a result.

#include "layer/split_specs.h"
#include "support/layer_fixture.h"
#include "support/rank_grid.h"

#include "conclave/balance.h"
#include "conclave/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::GridRank;
using testing::make_layer;
using testing::make_spec;
using testing::on_grid;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

struct ReplicaCase {
  int32_t ep_size;
  int32_t replicas;
  int64_t experts;
  EpTransport transport;
  bool all_of_one;  // all replicas are of the same expert
};

std::string name_of(const ::testing::TestParamInfo<ReplicaCase>& info) {
  const ReplicaCase& c = info.param;
  return "Ep" + std::to_string(c.ep_size) + "R" + std::to_string(c.replicas) + "E" +
         std::to_string(c.experts) +
         (c.transport == EpTransport::kVariable ? "Variable" : "Fixed") +
         (c.all_of_one ? "OneExpert" : "");
}

std::vector<ReplicaCase> all_cases() {
  std::vector<ReplicaCase> cases;
  for (const int32_t ranks : {1, 2, 3, 4}) {
    for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
      if (ranks == 1 && transport == EpTransport::kFixedSlots) continue;
      for (const int64_t experts : {8, 7, 3}) {
        cases.push_back({ranks, 0, experts, transport, false});
        cases.push_back({ranks, 3, experts, transport, false});
        cases.push_back({ranks, 3, experts, transport, true});
      }
    }
  }
  return cases;
}

class RedundantExperts : public ::testing::TestWithParam<ReplicaCase> {};

TEST_P(RedundantExperts, AnyReplicas_GiveTheBitsAndIdsOfNone) {
  const ReplicaCase& c = GetParam();
  MoeSpec spec = make_spec(c.experts, 3, 40, 24, DType::kBF16);
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 16};
  const Tensor hidden = random_tensor(DType::kBF16, 29, 40, 1);
  const OwnedLayer one = make_layer(spec);
  std::vector<int64_t> expected_load(static_cast<size_t>(c.experts), 0);
  const auto expected =
      run_layer(one.layer, hidden.view(), DType::kBF16, {.expert_load = expected_load});
  ParallelSpec parallel{.ep_size = c.ep_size, .num_redundant_experts = c.replicas};
  if (c.all_of_one) parallel.replica_of.assign(static_cast<size_t>(c.replicas), 1);
  on_grid(c.ep_size, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    const MoeLayer layer = MoeLayer::create(
        context, spec, *one.source, {.max_tokens = 8, .transport = c.transport}, rank.in(parallel));
    std::vector<int64_t> load(static_cast<size_t>(c.experts), 0);
    const auto output = run_layer(layer, hidden.view(), DType::kBF16, {.expert_load = load});
    EXPECT_TRUE(same_bits(output.out, expected.out));
    EXPECT_TRUE(same_bits(output.ids, expected.ids));
    EXPECT_EQ(load, expected_load);
  });
}

INSTANTIATE_TEST_SUITE_P(Splits, RedundantExperts, ::testing::ValuesIn(all_cases()), name_of);

// A layer whose few hot experts lie on one rank, before and after it is made anew by its own
// counts.
TEST(BalancedExperts, PlacementByTheCountsOfALayer_EvensRanksAndKeepsBits) {
  constexpr int32_t kRanks = 3;
  MoeSpec spec = make_spec(9, 2, 40, 24, DType::kBF16);
  spec.router.name = "simulated";
  spec.router.simulated = {.distribution = SimulatedDistribution::kZipf, .seed = 3};
  const Tensor hidden = random_tensor(DType::kBF16, 61, 40, 1);
  const OwnedLayer one = make_layer(spec);
  std::vector<int64_t> counts(9, 0);
  const auto expected = run_layer(one.layer, hidden.view(), DType::kBF16, {.expert_load = counts});
  const std::vector<double> load(counts.begin(), counts.end());
  const ExpertSlots linear{
      .num_experts = 9, .logical_of = {0, 1, 2, 3, 4, 5, 6, 7, 8}, .first_of = {0, 3, 6, 9}};
  for (const std::string_view rule : balance_rules()) {
    BalanceRequest request{.rule = std::string(rule), .num_ranks = kRanks};
    if (rule == "surviving") request.num_redundant_experts = 10;
    if (rule == "steady") request.previous = linear.logical_of;
    const ExpertSlots slots = balance_experts(load, request);
    EXPECT_GE(balancedness(load, slots), balancedness(load, linear)) << rule;
    on_grid(kRanks, 1, [&](const GridRank& rank) {
      const Context context(rank.context_options());
      const MoeLayer layer = MoeLayer::create(context, spec, *one.source, {.max_tokens = 16},
                                              rank.in(with_slots({}, slots)));
      const auto output = run_layer(layer, hidden.view(), DType::kBF16, {});
      EXPECT_TRUE(same_bits(output.out, expected.out)) << rule;
    });
  }
}

// Covers every kind of layer, with replicas and with experts where the caller wants them.
TEST(RedundantExpertParts, EveryPartAndCustomRanks_GiveTheBitsOfOneRank) {
  constexpr auto kCustom = PlacementStrategy::kCustom;
  const std::vector<ParallelSpec> splits = {
      {.ep_size = 2, .num_redundant_experts = 3},
      {.ep_size = 3, .placement = kCustom, .rank_of = {2, 0, 0, 2, 0}},
      {.ep_size = 2,
       .placement = kCustom,
       .rank_of = {1, 0, 0, 1, 1, 0, 0},
       .num_redundant_experts = 2,
       .replica_of = {4, 0}}};
  for (const auto& [name, spec] : testing::split_specs(24, DType::kBF16)) {
    const Tensor hidden = random_tensor(DType::kBF16, 19, 40, 1);
    const OwnedLayer one = make_layer(spec);
    Tensor expected(DType::kBF16, {19, 40});
    one.layer.forward({.hidden = hidden.view(), .out = expected.view()});
    for (size_t split = 0; split < splits.size(); ++split) {
      SCOPED_TRACE(name + ", split " + std::to_string(split));
      on_grid(splits[split].ep_size, 1, [&](const GridRank& rank) {
        const Context context(rank.context_options());
        const MoeLayer layer =
            MoeLayer::create(context, spec, *one.source, {.max_tokens = 8}, rank.in(splits[split]));
        Tensor out(DType::kBF16, {19, 40});
        layer.forward({.hidden = hidden.view(), .out = out.view()});
        EXPECT_TRUE(same_bits(out, expected)) << "rank " << rank.ep_rank;
      });
    }
  }
}

// Each replica of the one expert lies on another rank, so the rank that computes a token reveals
// its replica, chosen by the token's number in the call. All chunk sizes run against two and three
// replicas: if one divides the other, the number within the chunk would do as well.
class RedundantExpertChoice : public ::testing::TestWithParam<WeightOn> {};

INSTANTIATE_TEST_SUITE_P(Weights, RedundantExpertChoice,
                         ::testing::Values(WeightOn::kOutput, WeightOn::kInput),
                         [](const auto& side) {
                           return side.param == WeightOn::kInput ? "OnInput" : "OnOutput";
                         });

TEST_P(RedundantExpertChoice, TokenNumber_CountsOverChunksAndPaddingStaysOut) {
  // Both choices are of the one expert, and so of one replica.
  const int64_t top_k = GetParam() == WeightOn::kInput ? 2 : 1;
  MoeSpec spec = make_spec(1, 1, 16, 8, DType::kF32);
  spec.num_zero_experts = top_k - 1;
  spec.top_k = top_k;
  spec.weight_on = GetParam();
  const int64_t tokens = 37;
  const Tensor hidden = random_tensor(DType::kF32, tokens, 16, 2);
  const auto source = make_synthetic_source(spec, 5);
  const Context context({.num_threads = 1});
  Tensor ids(DType::kI32, {tokens, top_k});
  Tensor weights(DType::kF32, {tokens, top_k});
  for (int64_t i = 0; i < tokens * top_k; ++i) {
    ids.as<int32_t>()[i] = i / top_k % 5 == 4 ? -1 : 0;
    weights.as<float>()[i] = 1.0F;
  }
  for (const int32_t ranks : {2, 3}) {
    for (const int64_t max_tokens : {1, 5, 6, 7, 64}) {
      for (int32_t rank = 0; rank < ranks; ++rank) {
        SCOPED_TRACE("rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                     ", chunks of " + std::to_string(max_tokens));
        const MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_tokens = max_tokens},
                                                {.ep_size = ranks,
                                                 .ep_rank = rank,
                                                 .num_redundant_experts = ranks - 1,
                                                 .reduce = Reduce::kPartial});
        const auto output =
            run_layer(layer, hidden.view(), DType::kF32,
                      {.topk_ids = ids.const_view(), .topk_weights = weights.const_view()});
        for (int64_t t = 0; t < tokens; ++t) {
          const float* row = output.out.as<float>() + t * 16;
          const bool zero = std::all_of(row, row + 16, [](float value) { return value == 0.0F; });
          const bool mine = t % 5 != 4 && replica_hash(t) % static_cast<uint32_t>(ranks) ==
                                              static_cast<uint32_t>(rank);
          EXPECT_EQ(zero, !mine) << "token " << t;
        }
      }
    }
  }
}

// A token's number decides which replica serves it, and thereby how per-rank sums group its
// experts.
TEST(RedundantExpertPlan, PerRankSumsOfReplicas_AreNotCalledIndependentOfTheBatch) {
  const MoeSpec spec = make_spec(5, 3, 16, 8, DType::kF32);
  const auto group = make_local_group({.num_ranks = 2});
  const Context context({.num_threads = 1, .communicator = group[0].get()});
  const LayerOptions reduced{.ep_combine = EpCombine::kReducedPerRank};
  const ParallelSpec replicas{.ep_size = 2, .num_redundant_experts = 2};
  EXPECT_EQ(make_plan(context, spec, {}, replicas).determinism, "D1 D2 D3");
  EXPECT_EQ(make_plan(context, spec, reduced, {.ep_size = 2}).determinism, "D1 D2");
  EXPECT_EQ(make_plan(context, spec, reduced, replicas).determinism, "D1");
}

// vLLM counts the load of tokens that are not padding; so do we, over logical experts.
TEST(VllmMatrixReplicaLoad, PaddedTokens_AreNotCounted) {
  const MoeSpec spec = make_spec(4, 2, 16, 8, DType::kF32);
  const auto source = make_synthetic_source(spec, 5);
  const Context context({.num_threads = 1});
  const MoeLayer layer =
      MoeLayer::create(context, spec, *source, {.max_tokens = 5}, {.num_redundant_experts = 5});
  const int64_t tokens = 23;
  const Tensor hidden = random_tensor(DType::kF32, tokens, 16, 2);
  Tensor mask(DType::kBool, {tokens});
  for (int64_t t = 0; t < tokens; ++t) mask.as<uint8_t>()[t] = t < 14 ? 1 : 0;
  std::vector<int64_t> load(4, 0);
  const auto output = run_layer(layer, hidden.view(), DType::kF32,
                                {.padding_mask = mask.const_view(), .expert_load = load});
  std::vector<int64_t> expected(4, 0);
  for (int64_t i = 0; i < 14 * 2; ++i) {
    ++expected[static_cast<size_t>(output.ids.as<int32_t>()[i])];
  }
  EXPECT_EQ(load, expected);
  EXPECT_EQ(load[0] + load[1] + load[2] + load[3], 28);
}

TEST(RedundantExpertErrors, ReplicaOfNoExpert_IsAnInvalidArgument) {
  const MoeSpec spec = make_spec(4, 2, 16, 8, DType::kF32);
  const auto source = make_synthetic_source(spec, 5);
  const Context context({.num_threads = 1});
  const auto code = [&](const ParallelSpec& parallel) {
    return testing::code_of([&] { MoeLayer::create(context, spec, *source, {}, parallel); });
  };
  EXPECT_EQ(code({.num_redundant_experts = 1, .replica_of = {4}}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({.num_redundant_experts = 2, .replica_of = {1}}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({.num_redundant_experts = -2}), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace conclave

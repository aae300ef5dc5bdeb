#include "conclave/balance.h"

#include "placement/placement_cases.h"

#include "conclave/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>

namespace conclave {
namespace {

using testing::refused_argument;
using Ints = std::vector<int32_t>;
using Loads = std::vector<double>;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Ints counts_of(const ExpertSlots& slots) {
  Ints counts(static_cast<size_t>(slots.num_experts));
  for (const int32_t expert : slots.logical_of) ++counts[static_cast<size_t>(expert)];
  return counts;
}

bool has_pair_on_a_rank(const ExpertSlots& slots) {
  for (int32_t rank = 0; rank < slots.num_ranks(); ++rank) {
    const std::span<const int32_t> of_rank = slots.of_rank(rank);
    Ints own(of_rank.begin(), of_rank.end());
    std::ranges::sort(own);
    if (std::ranges::adjacent_find(own) != own.end()) return true;
  }
  return false;
}

// The vectors that vLLM's tests and DeepSeek's description of its rule have.
TEST(VllmMatrixBalance, PublishedLoads_GetThePublishedSlots) {
  const std::vector<Loads> loads = {{90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86},
                                    {20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27}};
  const std::vector<Ints> slots = {{5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1},
                                   {7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1}};
  const std::vector<Ints> counts = {{1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1},
                                    {1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1}};
  for (const bool distinct : {false, true}) {
    for (size_t layer = 0; layer < loads.size(); ++layer) {
      const ExpertSlots found = balance_experts(loads[layer], {.num_ranks = 8,
                                                               .num_redundant_experts = 4,
                                                               .num_nodes = 2,
                                                               .num_groups = 4,
                                                               .distinct_ranks = distinct});
      EXPECT_EQ(found.logical_of, slots[layer]);
      EXPECT_EQ(counts_of(found), counts[layer]);
      EXPECT_EQ(found.first_of, (Ints{0, 2, 4, 6, 8, 10, 12, 14, 16}));
    }
  }
}

TEST(Balance, GlobalRule_GivesTheHottestExpertItsReplicas) {
  const Loads load = {100, 1, 1, 1, 1, 1, 1, 1};
  const ExpertSlots slots =
      balance_experts(load, {.rule = "global", .num_ranks = 4, .num_redundant_experts = 4});
  EXPECT_EQ(counts_of(slots)[0], 4);
  EXPECT_EQ(slots.logical_of.size(), 12U);
  for (int32_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(std::ranges::count(slots.of_rank(rank), 0), 1) << rank;
  }
  EXPECT_GT(balancedness(load, slots), 0.97);
}

TEST(Balance, GroupsStayOnANode) {
  const Loads load = {9, 1, 1, 1, 8, 1, 1, 1, 7, 1, 1, 1, 6, 1, 1, 1};
  const ExpertSlots slots = balance_experts(
      load, {.num_ranks = 4, .num_redundant_experts = 4, .num_nodes = 2, .num_groups = 4});
  for (int32_t group = 0; group < 4; ++group) {
    Ints nodes;
    for (int32_t rank = 0; rank < 4; ++rank) {
      for (const int32_t expert : slots.of_rank(rank)) {
        if (expert / 4 == group) nodes.push_back(rank / 2);
      }
    }
    EXPECT_EQ(std::ranges::count(nodes, nodes.front()), std::ssize(nodes)) << group;
  }
}

// Groups or nodes that do not divide evenly, and a node without room for its experts.
TEST(Balance, ShapesThatDoNotDivide_AreGlobal) {
  Loads load(12);
  std::iota(load.begin(), load.end(), 1);
  const BalanceRequest global{.rule = "global", .num_ranks = 4, .num_redundant_experts = 4};
  const Ints expected = balance_experts(load, global).logical_of;
  for (const auto& [nodes, groups] :
       std::vector<std::pair<int32_t, int64_t>>{{2, 5}, {4, 6}, {2, 3}}) {
    BalanceRequest request = global;
    request.rule = "hierarchical";
    request.num_nodes = nodes;
    request.num_groups = groups;
    EXPECT_EQ(balance_experts(load, request).logical_of, expected) << nodes << " " << groups;
  }
  // Five ranks of two nodes are ranks of one.
  EXPECT_EQ(balance_experts(load, {.num_ranks = 5, .num_nodes = 2}).logical_of,
            balance_experts(load, {.num_ranks = 5, .num_nodes = 1}).logical_of);
}

TEST(Balance, DeepSeeksRule_MayPutTwoReplicasOnOneRank_OursDoesNot) {
  const Loads load = {1000, 1, 1, 1};
  BalanceRequest request{.rule = "global", .num_ranks = 2, .num_redundant_experts = 4};
  request.distinct_ranks = false;
  EXPECT_TRUE(has_pair_on_a_rank(balance_experts(load, request)));
  request.distinct_ranks = true;
  EXPECT_FALSE(has_pair_on_a_rank(balance_experts(load, request)));
}

TEST(Balance, SurvivingRule_PutsEveryExpertOnTwoRanks) {
  const Loads load = {40, 1, 1, 1, 9, 0};
  const ExpertSlots slots =
      balance_experts(load, {.rule = "surviving", .num_ranks = 3, .num_redundant_experts = 7});
  EXPECT_TRUE(survives_any_rank(slots));
  EXPECT_EQ(counts_of(slots)[0], 3);
  EXPECT_FALSE(survives_any_rank(
      balance_experts(load, {.rule = "global", .num_ranks = 3, .num_redundant_experts = 5})));
}

TEST(Balance, SteadyRule_MovesNothingWithoutAGain) {
  const Loads load(8, 5);
  const Ints previous = {3, 1, 7, 5, 0, 2, 4, 6};
  const ExpertSlots slots =
      balance_experts(load, {.rule = "steady", .num_ranks = 4, .previous = previous});
  EXPECT_EQ(slots.logical_of, previous);
}

TEST(Balance, SteadyRule_MovesFewExpertsForMostOfTheGain) {
  std::mt19937 random(11);
  constexpr int32_t kRanks = 16;
  constexpr int32_t kReplicas = 32;
  Loads load(128);
  for (size_t i = 0; i < load.size(); ++i) load[i] = 10000.0 / static_cast<double>(1 + i);
  std::ranges::shuffle(load, random);
  const BalanceRequest global{
      .rule = "global", .num_ranks = kRanks, .num_redundant_experts = kReplicas};
  const ExpertSlots before = balance_experts(load, global);
  for (double& rows : load) rows *= std::uniform_real_distribution(0.7, 1.3)(random);

  BalanceRequest request = global;
  request.previous = before.logical_of;
  const ExpertSlots anew = balance_experts(load, request);
  request.rule = "steady";
  const ExpertSlots steady = balance_experts(load, request);

  EXPECT_GT(balancedness(load, steady), balancedness(load, before) + 0.05);
  EXPECT_GT(balancedness(load, steady), balancedness(load, anew) - 0.05);
  EXPECT_LT(moved_experts(before, steady), moved_experts(before, anew) / 3);
  EXPECT_FALSE(has_pair_on_a_rank(steady));
}

TEST(Balance, ExpertsThatStay_KeepTheirSlots) {
  const Loads load = {9, 8, 7, 6, 5, 4, 3, 2};
  const BalanceRequest global{.rule = "global", .num_ranks = 2, .num_redundant_experts = 2};
  const ExpertSlots slots = balance_experts(load, global);
  Ints previous = slots.logical_of;
  std::ranges::reverse(std::span(previous).first(5));
  BalanceRequest request = global;
  request.previous = previous;
  EXPECT_EQ(balance_experts(load, request).logical_of, previous);
  EXPECT_EQ(moved_experts(slots, balance_experts(load, request)), 0);
}

TEST(Balance, BecomesACustomPlacement) {
  const Loads load = {50, 1, 30, 2, 2};
  const ExpertSlots slots =
      balance_experts(load, {.rule = "global", .num_ranks = 3, .num_redundant_experts = 3});
  const ParallelSpec split = with_slots({.ep_size = 1, .ep_rank = 2}, slots);
  EXPECT_EQ(split.ep_rank, 2);
  const ExpertPlacement placement = make_placement(5, split);
  ASSERT_EQ(placement.num_physical(), 8);
  for (int32_t rank = 0; rank < 3; ++rank) {
    Ints held;
    for (const int32_t physical : placement.experts_of[static_cast<size_t>(rank)]) {
      held.push_back(placement.logical_of[static_cast<size_t>(physical)]);
    }
    const std::span<const int32_t> of_rank = slots.of_rank(rank);
    Ints expected(of_rank.begin(), of_rank.end());
    std::ranges::sort(held);
    std::ranges::sort(expected);
    EXPECT_EQ(held, expected) << rank;
  }
}

TEST(Balancedness, IsTheMeanOverTheLargest) {
  const ExpertSlots slots{.num_experts = 3, .logical_of = {0, 1, 0, 2}, .first_of = {0, 2, 4}};
  // Expert 0 has 10 rows on each of two ranks: 10 + 30 and 10 + 0.
  EXPECT_DOUBLE_EQ(balancedness(Loads{20, 30, 0}, slots), 25.0 / 40);
  EXPECT_DOUBLE_EQ(balancedness(Loads{20, 0, 0}, slots), 1);
}

TEST(Balance, WrongLoads_AreRefused) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const Loads& load :
       {Loads{}, Loads{1, kNaN}, Loads{1, -1}, Loads{infinity, 1}, Loads{0, 0}}) {
    EXPECT_EQ(refused_argument([&] { balance_experts(load, {}); }), "load");
  }
  const ExpertSlots two{.num_experts = 2, .logical_of = {0, 1}, .first_of = {0, 2}};
  EXPECT_EQ(refused_argument([&] { balancedness(Loads{1, 2, 3}, two); }), "load");
}

TEST(Balance, WrongRequests_NameTheField) {
  const Loads load = {3, 2, 1};
  const auto refused = [&](const BalanceRequest& request) {
    return refused_argument([&] { balance_experts(load, request); });
  };
  EXPECT_EQ(refused({.rule = "best"}), "rule");
  EXPECT_EQ(refused({.num_ranks = 0}), "num_ranks");
  EXPECT_EQ(refused({.num_ranks = 1 << 21}), "num_ranks");
  EXPECT_EQ(refused({.num_redundant_experts = -1}), "num_redundant_experts");
  EXPECT_EQ(refused({.num_redundant_experts = INT32_MAX}), "num_redundant_experts");
  EXPECT_EQ(refused({.num_nodes = 0}), "num_nodes");
  EXPECT_EQ(refused({.num_groups = 0}), "num_groups");
  EXPECT_EQ(refused({.previous = {0, 1}}), "previous");
  EXPECT_EQ(refused({.previous = {0, 1, 3}}), "previous");
  EXPECT_EQ(refused({.rule = "steady"}), "previous");
  EXPECT_EQ(refused({.rule = "steady", .previous = {0, 1, 1}}), "previous");
  EXPECT_EQ(refused({.least_gain = -0.5}), "least_gain");
  EXPECT_EQ(refused({.least_gain = kNaN}), "least_gain");
  EXPECT_EQ(refused({.rule = "surviving", .num_redundant_experts = 3}), "num_ranks");
  EXPECT_EQ(refused({.rule = "surviving", .num_ranks = 2, .num_redundant_experts = 2}),
            "num_redundant_experts");
}

TEST(Balance, WrongSlots_NameTheField) {
  const ExpertSlots one{.num_experts = 1, .logical_of = {0}, .first_of = {0, 1}};
  const auto refused = [&](const ExpertSlots& slots) {
    return refused_argument([&] { survives_any_rank(slots); });
  };
  EXPECT_EQ(refused({.num_experts = 1, .logical_of = {1}, .first_of = {0, 1}}), "logical_of");
  EXPECT_EQ(refused({.num_experts = 1, .logical_of = {0}, .first_of = {0, 2}}), "first_of");
  EXPECT_EQ(refused({.num_experts = 1, .logical_of = {0}, .first_of = {1, 1}}), "first_of");
  EXPECT_EQ(refused({.num_experts = 1, .logical_of = {0}}), "first_of");
  const ExpertSlots other{.num_experts = 2, .logical_of = {0, 1}, .first_of = {0, 2}};
  EXPECT_EQ(refused_argument([&] { moved_experts(one, other); }), "after");
}

// What any rule promises for any load: the slots of a linear placement, every expert in one at
// least, replicas of an expert on ranks of their own where there are enough, no chance.
class AnyLoad : public ::testing::TestWithParam<std::string> {};

TEST_P(AnyLoad, KeepsThePromisesOfEveryRule) {
  const int rounds = 3000;
  std::mt19937 random(29);
  const auto below = [&](int32_t end) {
    return static_cast<int32_t>(random() % static_cast<uint32_t>(end));
  };
  for (int round = 0; round < rounds; ++round) {
    Loads load(static_cast<size_t>(1 + below(40)));
    const int32_t kind = below(5);
    for (double& rows : load) {
      if (kind == 0) rows = below(1000);
      if (kind == 1) rows = 7;
      if (kind == 2) rows = std::pow(2.0, below(63));
      if (kind == 3) rows = below(10) == 0 ? 1000 : 0;
      if (kind == 4) rows = std::numeric_limits<double>::max() / (1 + below(3));
    }
    load[static_cast<size_t>(below(static_cast<int32_t>(load.size())))] = 1e6;
    const auto experts = static_cast<int32_t>(load.size());
    BalanceRequest request{.rule = GetParam(),
                           .num_ranks = 2 + below(12),
                           .num_redundant_experts = below(3 * experts),
                           .num_nodes = 1 + below(4),
                           .num_groups = 1 + below(4)};
    if (request.rule == "surviving") request.num_redundant_experts += experts;
    if (request.rule == "steady") {
      request.previous = balance_experts(Loads(load.size(), 1),
                                         {.rule = "global",
                                          .num_ranks = request.num_ranks,
                                          .num_redundant_experts = request.num_redundant_experts})
                             .logical_of;
    }
    const ExpertSlots slots = balance_experts(load, request);
    const int32_t num_slots = experts + request.num_redundant_experts;
    ASSERT_EQ(std::ssize(slots.logical_of), num_slots);
    ASSERT_EQ(slots.num_ranks(), request.num_ranks);
    for (int32_t rank = 0; rank < request.num_ranks; ++rank) {
      const int32_t size = num_slots / request.num_ranks + (rank < num_slots % request.num_ranks);
      ASSERT_EQ(std::ssize(slots.of_rank(rank)), size);
    }
    const Ints counts = counts_of(slots);
    ASSERT_GE(std::ranges::min(counts), 1);
    // Nodes have fewer ranks than all: there a replica may find no rank of its own.
    const bool fits =
        num_slots <= int64_t{experts} * request.num_ranks && request.rule != "hierarchical";
    if (fits) {
      ASSERT_LE(std::ranges::max(counts), request.num_ranks);
      ASSERT_FALSE(has_pair_on_a_rank(slots)) << "round " << round;
    }
    if (request.rule == "surviving") {
      ASSERT_TRUE(survives_any_rank(slots));
    }
    const double even = balancedness(load, slots);
    ASSERT_TRUE(even > 0 && even <= 1 + 1e-12) << even;
    ASSERT_EQ(balance_experts(load, request).logical_of, slots.logical_of);
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, AnyLoad,
                         ::testing::Values("hierarchical", "global", "surviving", "steady"),
                         [](const auto& rule) { return rule.param; });

}  // namespace
}  // namespace conclave

#include "placement/placement_cases.h"

#include <gtest/gtest.h>

namespace conclave {
namespace {

using testing::describe;
using testing::place;
using testing::placement_cases;
using testing::PlacementCase;
using testing::refused_argument;
using Ints = std::vector<int32_t>;

TEST(ExpertMap, EveryRank_HoldsLocalIndexOrMinusOne) {
  for (const PlacementCase& c : placement_cases()) {
    SCOPED_TRACE(describe(c));
    const ExpertPlacement p = place(c);
    for (int32_t rank = 0; rank < c.num_ranks; ++rank) {
      const Ints map = p.expert_map(rank);
      ASSERT_EQ(map.size(), p.rank_of.size());
      for (size_t expert = 0; expert < map.size(); ++expert) {
        EXPECT_EQ(map[expert], p.rank_of[expert] == rank ? p.local_of[expert] : -1);
      }
    }
  }
}

TEST(ExpertMap, SharedExperts_FollowTheRanksOwn) {
  const ExpertPlacement p = place({5, 2, PlacementStrategy::kLinear});
  EXPECT_EQ(p.expert_map(0, 2), (Ints{0, 1, 2, -1, -1, 3, 4}));
  EXPECT_EQ(p.expert_map(1, 2), (Ints{-1, -1, -1, 0, 1, 2, 3}));
}

TEST(ExpertMask, SharedAreOnes_SentinelIsZero) {
  const ExpertPlacement p = place({5, 2, PlacementStrategy::kRoundRobin});
  EXPECT_EQ(p.expert_mask(0), (Ints{1, 0, 1, 0, 1, 0}));
  EXPECT_EQ(p.expert_mask(1, 2), (Ints{0, 1, 0, 1, 0, 1, 1, 0}));
}

TEST(ExpertMap, NoSuchRank_IsRefused) {
  const ExpertPlacement p = place({5, 2, PlacementStrategy::kLinear});
  EXPECT_EQ(refused_argument([&] { p.expert_map(2); }), "rank");
  EXPECT_EQ(refused_argument([&] { p.expert_map(-1); }), "rank");
  EXPECT_EQ(refused_argument([&] { p.expert_mask(0, -1); }), "num_shared");
  EXPECT_EQ(refused_argument([&] { p.expert_map(0, 2'000'000'000); }), "num_shared");
  EXPECT_EQ(refused_argument([&] { make_routing_tables(p, 2); }), "rank");
}

TEST(FromExpertMap, AnyRanksMap_PlacesItsExpertsOnThatRank) {
  for (const PlacementCase& c : placement_cases()) {
    SCOPED_TRACE(describe(c));
    const ExpertPlacement p = place(c);
    for (int32_t rank = 0; rank < c.num_ranks; ++rank) {
      const ParallelSpec map = from_expert_map(p.expert_map(rank), rank, c.num_ranks);
      EXPECT_NO_THROW(validate(map));
      EXPECT_EQ(map.reduce, Reduce::kPartial);
      const ExpertPlacement part = make_placement(c.num_experts, map);
      EXPECT_EQ(part.expert_map(rank), p.expert_map(rank));
      const ParallelSpec mask =
          from_expert_mask(p.expert_mask(rank, 3), c.num_experts, rank, c.num_ranks);
      EXPECT_EQ(mask.rank_of, map.rank_of);
    }
  }
}

TEST(FromExpertMap, AnyOrderOfLocalIndexes_IsAccepted) {
  EXPECT_EQ(from_expert_map(Ints{1, -1, 0}).rank_of, (Ints{0, -1, 0}));
  EXPECT_EQ(from_expert_map(Ints{-1, -1}).rank_of, (Ints{-1, -1}));
}

TEST(FromExpertMap, WrongEntries_AreRefused) {
  EXPECT_EQ(refused_argument([] { from_expert_map(Ints{0, 0}); }), "expert_map");
  EXPECT_EQ(refused_argument([] { from_expert_map(Ints{0, 2}); }), "expert_map");
  EXPECT_EQ(refused_argument([] { from_expert_map(Ints{0, -2}); }), "expert_map");
  EXPECT_EQ(refused_argument([] { from_expert_map(Ints{0}, 2, 2); }), "rank");
  EXPECT_EQ(refused_argument([] { from_expert_mask(Ints{1, 2}, 2); }), "expert_mask");
  EXPECT_EQ(refused_argument([] { from_expert_mask(Ints{1}, 2); }), "expert_mask");
}

TEST(ExpertMapText, HeldExperts_InOrderOfExperts) {
  EXPECT_EQ(expert_map_text(Ints{-1, 0, -1, 2, 1}), "0->1, 2->3, 1->4");
  EXPECT_EQ(expert_map_text(Ints{-1, -1}), "");
  EXPECT_EQ(expert_map_text(place({4, 2, PlacementStrategy::kRoundRobin}).expert_map(1)),
            "0->1, 1->3");
}

// The published closed form for round-robin is position = offset of the owner + g / ranks.
TEST(RoutingTables, RoundRobin_FollowsTheClosedForm) {
  for (const PlacementCase& c : placement_cases()) {
    if (c.strategy != PlacementStrategy::kRoundRobin) continue;
    SCOPED_TRACE(describe(c));
    const ExpertPlacement p = place(c);
    const auto experts = static_cast<int32_t>(c.num_experts);
    for (int32_t rank = 0; rank < c.num_ranks; ++rank) {
      const RoutingTables tables = make_routing_tables(p, rank);
      ASSERT_EQ(static_cast<int32_t>(tables.expert_at_position.size()), experts);
      Ints local;
      for (int32_t g = 0; g < experts; ++g) {
        const int32_t owner = g % c.num_ranks;
        const int32_t position = owner * (experts / c.num_ranks) +
                                 std::min(owner, experts % c.num_ranks) + g / c.num_ranks;
        EXPECT_EQ(tables.position_of_expert[static_cast<size_t>(g)], position);
        EXPECT_EQ(tables.expert_at_position[static_cast<size_t>(position)], g);
        if (owner == rank) local.push_back(g);
      }
      EXPECT_EQ(tables.expert_of_local, local);
    }
  }
}

TEST(RoutingTables, Linear_IsTheIdentity) {
  const RoutingTables tables = make_routing_tables(place({7, 3, PlacementStrategy::kLinear}), 1);
  EXPECT_EQ(tables.position_of_expert, (Ints{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(tables.expert_at_position, tables.position_of_expert);
  EXPECT_EQ(tables.expert_of_local, (Ints{3, 4}));
}

TEST(RoutingTables, ExpertOnNoRank_HasNoPosition) {
  const ExpertPlacement p =
      make_placement(3, {.placement = PlacementStrategy::kCustom, .rank_of = {0, -1, 0}});
  const RoutingTables tables = make_routing_tables(p, 0);
  EXPECT_EQ(tables.position_of_expert, (Ints{0, -1, 1}));
  EXPECT_EQ(tables.expert_at_position, (Ints{0, 2}));
}

TEST(PlacementStrategyChoice, RoundRobin_NeedsGroupsAndNothingThatMoves) {
  const auto choose = [](const StrategyRequest& request) {
    return determine_placement_strategy(request);
  };
  constexpr auto kRoundRobin = PlacementStrategy::kRoundRobin;
  EXPECT_EQ(choose({.wanted = kRoundRobin, .num_groups = 8}).strategy, kRoundRobin);
  EXPECT_EQ(choose({.wanted = kRoundRobin, .num_groups = 8}).reason, "");
  const std::vector<std::pair<StrategyRequest, std::string>> refused = {
      {{.wanted = kRoundRobin}, "group"},
      {{.wanted = kRoundRobin, .num_groups = 8, .num_redundant_experts = 2}, "redundant"},
      {{.wanted = kRoundRobin, .num_groups = 8, .rebalances = true}, "rebalancing"},
      {{.wanted = kRoundRobin, .num_groups = 8, .transport_permits = false}, "transport"}};
  for (const auto& [request, word] : refused) {
    EXPECT_EQ(choose(request).strategy, PlacementStrategy::kLinear);
    EXPECT_NE(choose(request).reason.find(word), std::string::npos) << choose(request).reason;
  }
}

TEST(PlacementStrategyChoice, OtherWishes_AreGranted) {
  for (const auto wanted : {PlacementStrategy::kLinear, PlacementStrategy::kCustom}) {
    const StrategyChoice choice = determine_placement_strategy(
        {.wanted = wanted, .num_redundant_experts = 4, .rebalances = true});
    EXPECT_EQ(choice.strategy, wanted);
    EXPECT_EQ(choice.reason, "");
  }
}

}  // namespace
}  // namespace conclave

// Walks random layers from one placement to another, as a layer would be taken.
#include "placement/moves.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

constexpr auto kCustom = PlacementStrategy::kCustom;

PlaceTable table_of(int64_t experts, std::vector<int32_t> ranks, int32_t num_ranks, int32_t spare,
                    std::vector<int32_t> replica_of = {}) {
  ParallelSpec parallel{.ep_size = num_ranks, .placement = kCustom, .rank_of = std::move(ranks)};
  parallel.num_redundant_experts = static_cast<int32_t>(replica_of.size());
  parallel.replica_of = std::move(replica_of);
  return first_epoch(experts, parallel, spare)->places;
}

ExpertSlots slots(int64_t experts, const std::vector<std::vector<int32_t>>& ranks) {
  ExpertSlots slots{.num_experts = experts, .first_of = {0}};
  for (const auto& rank : ranks) {
    slots.logical_of.insert(slots.logical_of.end(), rank.begin(), rank.end());
    slots.first_of.push_back(static_cast<int32_t>(slots.logical_of.size()));
  }
  return slots;
}

int64_t in_use(const PlaceTable& table) {
  int64_t count = 0;
  for (const auto& row : table.experts) {
    count += std::ranges::count_if(row, [](int32_t expert) { return expert >= 0; });
  }
  return count;
}

// Takes the moves of one round and compares with what the planner says.
void expect_round(const PlaceTable& before, const MoveRound& round) {
  std::set<std::pair<int32_t, int32_t>> written;
  const auto at = [](const PlaceTable& table, int32_t rank, int32_t place) {
    const auto row = table.of_rank(rank);
    return place < static_cast<int32_t>(row.size()) ? row[static_cast<size_t>(place)] : -1;
  };
  for (const ExpertMove& move : round.moves) {
    EXPECT_EQ(at(before, move.from_rank, move.from_place), move.expert) << "reads another expert";
    EXPECT_EQ(at(before, move.to_rank, move.to_place), -1) << "overwrites a place in use";
    EXPECT_TRUE(written.insert({move.to_rank, move.to_place}).second) << "two moves to one place";
  }
  std::set<int32_t> lie;
  for (int32_t rank = 0; rank < round.after.num_ranks(); ++rank) {
    const auto row = round.after.of_rank(rank);
    for (int32_t place = 0; place < static_cast<int32_t>(row.size()); ++place) {
      const int32_t expert = row[static_cast<size_t>(place)];
      if (expert < 0) continue;
      lie.insert(expert);
      EXPECT_TRUE(at(before, rank, place) == expert || written.contains({rank, place}))
          << "expert " << expert << " is nowhere";
    }
  }
  EXPECT_EQ(static_cast<int64_t>(lie.size()), before.num_experts) << "an expert is lost";
  EXPECT_LE(in_use(round.after), before.num_slots);
}

void expect_way(const PlaceTable& from, const ExpertSlots& to, bool with_temporary) {
  const std::vector<MoveRound> rounds = plan_moves(from, to, with_temporary);
  PlaceTable table = from;
  for (const MoveRound& round : rounds) {
    expect_round(table, round);
    table = round.after;
  }
  EXPECT_TRUE(table.is_addressable());
  EXPECT_FALSE(table.has_temporary);
  EXPECT_EQ(plan_moves(table, to, false).size(), 0U) << "it is not there yet";
  const ExpertSlots reached = slots_of(table);
  for (int32_t rank = 0; rank < to.num_ranks(); ++rank) {
    const auto sorted = [&](const ExpertSlots& of) {
      std::vector<int32_t> experts(of.of_rank(rank).begin(), of.of_rank(rank).end());
      std::ranges::sort(experts);
      return experts;
    };
    EXPECT_EQ(sorted(reached), sorted(to));
    const auto row = from.of_rank(rank);
    for (size_t place = 0; place < row.size(); ++place) {
      const bool stays = row[place] >= 0 && std::ranges::count(to.of_rank(rank), row[place]) > 0 &&
                         std::ranges::count(row, row[place]) == 1;
      if (stays) {
        EXPECT_EQ(table.of_rank(rank)[place], row[place]) << "it has moved on its rank";
      }
    }
  }
}

TEST(PlanMoves, TwoExpertsThatChangeRanks_NeedAFreePlace) {
  const ExpertSlots swapped = slots(4, {{0, 3}, {2, 1}});
  const PlaceTable full = table_of(4, {0, 0, 1, 1}, 2, 0);
  EXPECT_THROW(plan_moves(full, swapped, false), Error);
  expect_way(full, swapped, true);
  EXPECT_TRUE(plan_moves(full, swapped, true).front().after.has_temporary);
  const PlaceTable spare = table_of(4, {0, 0, 1, 1}, 2, 1);
  for (const MoveRound& round : plan_moves(spare, swapped, true)) {
    EXPECT_FALSE(round.after.has_temporary) << "nothing passes through it";
  }
  const std::vector<MoveRound> rounds = plan_moves(spare, swapped, false);
  ASSERT_EQ(rounds.size(), 1U);
  EXPECT_EQ(rounds[0].moves.size(), 2U);
  EXPECT_EQ(rounds[0].after.experts[0], (std::vector<int32_t>{0, -1, 3}));
  EXPECT_EQ(rounds[0].after.experts[1], (std::vector<int32_t>{2, -1, 1}));
}

TEST(PlanMoves, ReplicaThatGivesWay_NeedsNoFreePlace) {
  const PlaceTable table = table_of(3, {0, 0, 1, 1}, 2, 0, {0});
  const ExpertSlots wanted = slots(3, {{0, 1}, {2, 1}});
  const std::vector<MoveRound> rounds = plan_moves(table, wanted, false);
  ASSERT_EQ(rounds.size(), 2U);
  EXPECT_TRUE(rounds[0].moves.empty()) << "the old replica goes first";
  expect_way(table, wanted, false);
}

TEST(PlanMoves, SameSlots_AreNoRounds) {
  const PlaceTable table = table_of(4, {0, 1, 0, 1}, 2, 1);
  EXPECT_TRUE(plan_moves(table, slots(4, {{2, 0}, {1, 3}}), false).empty());
}

TEST(PlanMoves, WhatDoesNotFit_IsRefusedWithTheReason) {
  const PlaceTable table = table_of(4, {0, 0, 1, 1}, 2, 1);
  const auto reason = [&](const ExpertSlots& to) {
    const Support support = can_hold(table, to);
    return support ? std::string("yes") : support.reason();
  };
  EXPECT_EQ(reason(slots(4, {{0, 1}, {2, 3}})), "yes");
  EXPECT_EQ(reason(slots(4, {{0, 1, 2}, {3}})),
            "rank 0 has places for 2 experts, the slots give it 3");
  EXPECT_EQ(reason(slots(4, {{0, 1}, {2, 2}})), "expert 3 is in no slot");
  EXPECT_EQ(reason(slots(4, {{0, 1}, {2, 4}})), "a slot has expert 4, outside 0 to 3");
  EXPECT_EQ(reason(slots(4, {{0, 1}, {2}, {3}})),
            "the layer has 4 experts on 2 ranks, the slots 4 on 3");
  EXPECT_EQ(reason(slots(5, {{0, 1}, {2, 3}})),
            "the layer has 4 experts on 2 ranks, the slots 5 on 2");
  ExpertSlots torn = slots(4, {{0, 1}, {2, 3}});
  torn.first_of = {0, 3, 2};
  EXPECT_EQ(reason(torn), "first_of does not cut the slots into those of each rank");
  EXPECT_EQ(reason({.num_experts = 4, .logical_of = {}, .first_of = {}}),
            "first_of does not cut the slots into those of each rank");
  EXPECT_THROW(plan_moves(table, torn, true), Error);
}

// Every walk ends, with any number of spare places and with none, for random layers.
TEST(PlanMoves, RandomWays_KeepEveryExpertSomewhere) {
  std::mt19937 random(7);
  const auto draw = [&](int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(random);
  };
  for (int round = 0; round < 3000; ++round) {
    SCOPED_TRACE("seed 7, round " + std::to_string(round));
    const int32_t ranks = draw(1, 5);
    const int32_t experts = draw(1, 9);
    const int32_t replicas = draw(0, 4);
    const int32_t spare = draw(0, 3);
    std::vector<int32_t> rank_of;
    std::vector<int32_t> replica_of;
    for (int32_t p = 0; p < experts + replicas; ++p) rank_of.push_back(draw(0, ranks - 1));
    for (int32_t r = 0; r < replicas; ++r) replica_of.push_back(draw(0, experts - 1));
    PlaceTable table = table_of(experts, rank_of, ranks, spare, replica_of);
    for (int32_t step = 0; step < 3; ++step) {
      // A random order of all slots and some replicas, dealt to ranks that have room.
      std::vector<int32_t> logical;
      for (int32_t e = 0; e < experts; ++e) logical.push_back(e);
      for (int32_t r = draw(0, replicas); r > 0; --r) logical.push_back(draw(0, experts - 1));
      std::ranges::shuffle(logical, random);
      std::vector<std::vector<int32_t>> given(static_cast<size_t>(ranks));
      for (const int32_t expert : logical) {
        int32_t rank = draw(0, ranks - 1);
        while (static_cast<int32_t>(given[static_cast<size_t>(rank)].size()) ==
               table.most_experts(rank)) {
          rank = (rank + 1) % ranks;
        }
        given[static_cast<size_t>(rank)].push_back(expert);
      }
      const ExpertSlots to = slots(experts, given);
      expect_way(table, to, true);
      if (spare > 0) expect_way(table, to, false);
      if (::testing::Test::HasFailure()) return;
      const std::vector<MoveRound> rounds = plan_moves(table, to, true);
      if (!rounds.empty()) table = rounds.back().after;
    }
  }
}

TEST(PlacesEpoch, NumbersFollowRankAndPlace_AndFreePlacesHaveNone) {
  PlaceTable places = table_of(3, {0, 0, 1, 1}, 2, 1, {1});
  places.experts = {{-1, 2, 1}, {1, -1, 0}};
  const auto epoch = epoch_of_places(5, places);
  EXPECT_EQ(epoch->number, 5U);
  EXPECT_EQ(epoch->experts.logical_of, (std::vector<int32_t>{0, 1, 2, 1}));
  EXPECT_EQ(epoch->experts.rank_of, (std::vector<int32_t>{1, 0, 0, 1}));
  EXPECT_EQ(epoch->experts.local_of, (std::vector<int32_t>{2, 2, 1, 0}));
  EXPECT_TRUE(epoch->has_replicas());
  EXPECT_EQ(slots_of(places).logical_of, (std::vector<int32_t>{2, 1, 1, 0}));
  places.experts = {{-1, 2, 1}, {-1, -1, 0}};
  EXPECT_TRUE(epoch_of_places(6, places)->has_replicas()) << "as planned";
  EXPECT_NE(epoch_of_places(6, places)->key, epoch->key);
}

}  // namespace
}  // namespace conclave

#include "placement/placement.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace conclave {
namespace {

using placement::ExpertPlacement;
using placement::make_placement;

struct Case {
  int64_t num_experts;
  int32_t num_ranks;
  PlacementStrategy strategy;
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const int64_t experts : {1, 2, 3, 4, 7, 8, 9, 16, 17, 18, 32, 33, 64, 128, 513}) {
    for (const int32_t ranks : {1, 2, 3, 4, 8, 16, 40}) {
      cases.push_back({experts, ranks, PlacementStrategy::kLinear});
      cases.push_back({experts, ranks, PlacementStrategy::kRoundRobin});
    }
  }
  return cases;
}

std::string describe(const Case& c) {
  return "experts " + std::to_string(c.num_experts) + ", ranks " + std::to_string(c.num_ranks) +
         (c.strategy == PlacementStrategy::kLinear ? ", linear" : ", round-robin");
}

TEST(Placement, AnySizes_PlaceEveryExpertOnce) {
  for (const Case& c : all_cases()) {
    SCOPED_TRACE(describe(c));
    const ExpertPlacement p = make_placement(c.num_experts, c.num_ranks, c.strategy);
    ASSERT_EQ(p.num_ranks, c.num_ranks);
    ASSERT_EQ(static_cast<int64_t>(p.rank_of.size()), c.num_experts);
    ASSERT_EQ(static_cast<int64_t>(p.local_of.size()), c.num_experts);
    ASSERT_EQ(static_cast<int32_t>(p.experts_of.size()), c.num_ranks);
    std::vector<int> seen(static_cast<size_t>(c.num_experts), 0);
    for (size_t rank = 0; rank < p.experts_of.size(); ++rank) {
      for (size_t local = 0; local < p.experts_of[rank].size(); ++local) {
        const auto expert = static_cast<size_t>(p.experts_of[rank][local]);
        ASSERT_LT(expert, seen.size());
        ++seen[expert];
        EXPECT_EQ(p.rank_of[expert], static_cast<int32_t>(rank));
        EXPECT_EQ(p.local_of[expert], static_cast<int32_t>(local));
      }
    }
    EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
  }
}

TEST(Placement, AnySizes_DifferByAtMostOneExpert) {
  for (const Case& c : all_cases()) {
    SCOPED_TRACE(describe(c));
    const ExpertPlacement p = make_placement(c.num_experts, c.num_ranks, c.strategy);
    const auto base = static_cast<size_t>(c.num_experts / c.num_ranks);
    const auto larger = static_cast<size_t>(c.num_experts % c.num_ranks);
    for (size_t rank = 0; rank < p.experts_of.size(); ++rank) {
      EXPECT_EQ(p.experts_of[rank].size(), base + (rank < larger ? 1 : 0)) << "rank " << rank;
    }
  }
}

TEST(Placement, ExpertMap_HoldsLocalIndexOrMinusOne) {
  for (const Case& c : all_cases()) {
    SCOPED_TRACE(describe(c));
    const ExpertPlacement p = make_placement(c.num_experts, c.num_ranks, c.strategy);
    for (int32_t rank = 0; rank < c.num_ranks; ++rank) {
      const std::vector<int32_t> map = p.expert_map(rank);
      ASSERT_EQ(map.size(), p.rank_of.size());
      for (size_t expert = 0; expert < map.size(); ++expert) {
        EXPECT_EQ(map[expert], p.rank_of[expert] == rank ? p.local_of[expert] : -1);
      }
    }
  }
}

TEST(Placement, LinearUnevenExperts_FirstRanksHoldOneMore) {
  const ExpertPlacement p = make_placement(10, 4, PlacementStrategy::kLinear);
  EXPECT_EQ(p.experts_of,
            (std::vector<std::vector<int32_t>>{{0, 1, 2}, {3, 4, 5}, {6, 7}, {8, 9}}));
}

TEST(Placement, RoundRobinUnevenExperts_StridesByRanks) {
  const ExpertPlacement p = make_placement(10, 4, PlacementStrategy::kRoundRobin);
  EXPECT_EQ(p.experts_of,
            (std::vector<std::vector<int32_t>>{{0, 4, 8}, {1, 5, 9}, {2, 6}, {3, 7}}));
}

TEST(Placement, MoreRanksThanExperts_LeavesTheLastRanksEmpty) {
  for (const auto strategy : {PlacementStrategy::kLinear, PlacementStrategy::kRoundRobin}) {
    const ExpertPlacement p = make_placement(3, 5, strategy);
    EXPECT_EQ(p.experts_of, (std::vector<std::vector<int32_t>>{{0}, {1}, {2}, {}, {}}));
    EXPECT_EQ(p.expert_map(4), (std::vector<int32_t>{-1, -1, -1}));
  }
}

void expect_invalid(int64_t experts, int32_t ranks, PlacementStrategy strategy,
                    const std::string& argument) {
  try {
    make_placement(experts, ranks, strategy);
    ADD_FAILURE() << "accepted " << experts << " experts on " << ranks << " ranks";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(error.detail().tensor, argument);
  }
}

TEST(Placement, BadSizes_AreRefusedByName) {
  expect_invalid(0, 1, PlacementStrategy::kLinear, "num_experts");
  expect_invalid(-4, 1, PlacementStrategy::kLinear, "num_experts");
  expect_invalid(int64_t{1} << 40, 1, PlacementStrategy::kLinear, "num_experts");
  expect_invalid(8, 0, PlacementStrategy::kLinear, "num_ranks");
  expect_invalid(8, -1, PlacementStrategy::kRoundRobin, "num_ranks");
  expect_invalid(8, 2, static_cast<PlacementStrategy>(7), "placement");
}

}  // namespace
}  // namespace conclave

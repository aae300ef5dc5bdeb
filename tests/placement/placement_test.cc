#include "placement/placement_cases.h"

#include "conclave/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace conclave {
namespace {

using testing::describe;
using testing::place;
using testing::placement_cases;
using testing::PlacementCase;
using testing::refused_argument;
using RankExperts = std::vector<std::vector<int32_t>>;

// Every expert on a rank is listed there once, and the three tables agree.
void expect_consistent(const ExpertPlacement& p) {
  const auto physical = static_cast<size_t>(p.num_physical());
  ASSERT_EQ(p.rank_of.size(), physical);
  ASSERT_EQ(p.local_of.size(), physical);
  ASSERT_EQ(static_cast<int32_t>(p.experts_of.size()), p.num_ranks);
  std::vector<int> seen(physical, 0);
  for (size_t rank = 0; rank < p.experts_of.size(); ++rank) {
    for (size_t local = 0; local < p.experts_of[rank].size(); ++local) {
      const auto expert = static_cast<size_t>(p.experts_of[rank][local]);
      ASSERT_LT(expert, seen.size());
      ++seen[expert];
      EXPECT_EQ(p.rank_of[expert], static_cast<int32_t>(rank));
      EXPECT_EQ(p.local_of[expert], static_cast<int32_t>(local));
    }
  }
  for (size_t expert = 0; expert < physical; ++expert) {
    EXPECT_EQ(seen[expert], p.rank_of[expert] >= 0 ? 1 : 0) << "expert " << expert;
  }
}

TEST(Placement, AnySizes_PlaceEveryExpertOnce) {
  for (const PlacementCase& c : placement_cases()) {
    SCOPED_TRACE(describe(c));
    const ExpertPlacement p = place(c);
    EXPECT_EQ(p.num_ranks, c.num_ranks);
    EXPECT_EQ(p.num_physical(), c.num_experts);
    expect_consistent(p);
    EXPECT_EQ(std::count(p.rank_of.begin(), p.rank_of.end(), -1), 0);
  }
}

TEST(Placement, AnySizes_DifferByAtMostOneExpert) {
  for (const PlacementCase& c : placement_cases()) {
    SCOPED_TRACE(describe(c));
    const ExpertPlacement p = place(c);
    const auto base = static_cast<size_t>(c.num_experts / c.num_ranks);
    const auto larger = static_cast<size_t>(c.num_experts % c.num_ranks);
    for (size_t rank = 0; rank < p.experts_of.size(); ++rank) {
      EXPECT_EQ(p.experts_of[rank].size(), base + (rank < larger ? 1 : 0)) << "rank " << rank;
    }
  }
}

TEST(Placement, LinearUnevenExperts_FirstRanksHoldOneMore) {
  EXPECT_EQ(place({10, 4, PlacementStrategy::kLinear}).experts_of,
            (RankExperts{{0, 1, 2}, {3, 4, 5}, {6, 7}, {8, 9}}));
}

TEST(Placement, RoundRobinUnevenExperts_StridesByRanks) {
  EXPECT_EQ(place({10, 4, PlacementStrategy::kRoundRobin}).experts_of,
            (RankExperts{{0, 4, 8}, {1, 5, 9}, {2, 6}, {3, 7}}));
}

TEST(Placement, MoreRanksThanExperts_LeavesTheLastRanksEmpty) {
  for (const auto strategy : {PlacementStrategy::kLinear, PlacementStrategy::kRoundRobin}) {
    const ExpertPlacement p = place({3, 5, strategy});
    EXPECT_EQ(p.experts_of, (RankExperts{{0}, {1}, {2}, {}, {}}));
    EXPECT_EQ(p.expert_map(4), (std::vector<int32_t>{-1, -1, -1}));
  }
}

TEST(Placement, RedundantExperts_ReplicateFromTheFirstOn) {
  const ExpertPlacement p = make_placement(5, {.ep_size = 3, .num_redundant_experts = 7});
  EXPECT_EQ(p.logical_of, (std::vector<int32_t>{0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1}));
  EXPECT_EQ(p.experts_of, (RankExperts{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}}));
  EXPECT_EQ(p.num_experts, 5);
  expect_consistent(p);
}

TEST(Placement, GivenReplicas_AreThoseAskedFor) {
  const ExpertPlacement p =
      make_placement(4, {.ep_size = 2, .num_redundant_experts = 2, .replica_of = {3, 3}});
  EXPECT_EQ(p.logical_of, (std::vector<int32_t>{0, 1, 2, 3, 3, 3}));
  EXPECT_EQ(p.experts_of, (RankExperts{{0, 1, 2}, {3, 4, 5}}));
}

TEST(Placement, CustomRanks_AreFollowedAndNumberedInOrder) {
  const ExpertPlacement p = make_placement(
      5, {.ep_size = 3, .placement = PlacementStrategy::kCustom, .rank_of = {2, 0, -1, 2, 0}});
  EXPECT_EQ(p.experts_of, (RankExperts{{1, 4}, {}, {0, 3}}));
  EXPECT_EQ(p.local_of, (std::vector<int32_t>{0, 0, -1, 1, 1}));
  expect_consistent(p);
}

TEST(Placement, CustomRanksWithReplicas_CountPhysicalExperts) {
  const ExpertPlacement p = make_placement(2, {.ep_size = 2,
                                               .placement = PlacementStrategy::kCustom,
                                               .rank_of = {0, 0, 1},
                                               .num_redundant_experts = 1});
  EXPECT_EQ(p.experts_of, (RankExperts{{0, 1}, {2}}));
}

TEST(UpdatePlacement, AnyChangeOfRanks_IsThatOfANewPlacement) {
  for (const PlacementCase& c : placement_cases()) {
    for (const int32_t ranks : {1, 3, 16}) {
      const ExpertPlacement updated = update_placement(place(c), ranks);
      const ExpertPlacement fresh = place({c.num_experts, ranks, c.strategy});
      EXPECT_EQ(updated.num_ranks, ranks);
      EXPECT_EQ(updated.rank_of, fresh.rank_of);
      EXPECT_EQ(updated.local_of, fresh.local_of);
      EXPECT_EQ(updated.experts_of, fresh.experts_of);
    }
  }
}

TEST(UpdatePlacement, ReplicasStay_AndCustomRanksAreRefused) {
  const ExpertPlacement p = make_placement(5, {.ep_size = 3, .num_redundant_experts = 3});
  EXPECT_EQ(update_placement(p, 2).experts_of, (RankExperts{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(update_placement(p, 2).logical_of, p.logical_of);
  const ExpertPlacement custom =
      make_placement(1, {.placement = PlacementStrategy::kCustom, .rank_of = {0}});
  EXPECT_EQ(refused_argument([&] { update_placement(custom, 2); }), "placement");
  EXPECT_EQ(refused_argument([&] { update_placement(p, 0); }), "num_ranks");
}

TEST(Placement, BadSizes_AreRefusedByName) {
  const auto refused = [](int64_t experts, const ParallelSpec& parallel) {
    return refused_argument([&] { make_placement(experts, parallel); });
  };
  EXPECT_EQ(refused(0, {}), "num_experts");
  EXPECT_EQ(refused(-4, {}), "num_experts");
  EXPECT_EQ(refused(int64_t{1} << 40, {}), "num_experts");
  EXPECT_EQ(refused((int64_t{1} << 24) + 1, {}), "num_experts");
  EXPECT_EQ(refused(int64_t{1} << 24, {.num_redundant_experts = 1}), "num_redundant_experts");
  EXPECT_EQ(refused(8, {.num_redundant_experts = 2'000'000'000}), "num_redundant_experts");
  EXPECT_EQ(refused_argument([] { slots_of(8, {.num_redundant_experts = 2'000'000'000}); }),
            "num_redundant_experts");
  EXPECT_EQ(refused(8, {.ep_size = 0}), "num_ranks");
  EXPECT_EQ(refused(8, {.ep_size = -1, .placement = PlacementStrategy::kRoundRobin}), "num_ranks");
  EXPECT_EQ(refused(8, {.placement = static_cast<PlacementStrategy>(7)}), "placement");
  EXPECT_EQ(refused(8, {.num_redundant_experts = -1}), "num_redundant_experts");
  EXPECT_EQ(refused(8, {.num_redundant_experts = 1, .replica_of = {8}}), "replica_of");
  EXPECT_EQ(refused(8, {.num_redundant_experts = 1, .replica_of = {-1}}), "replica_of");
  EXPECT_EQ(refused(8, {.num_redundant_experts = 1, .replica_of = {1, 2}}), "replica_of");
  const auto custom = [&](std::vector<int32_t> ranks) {
    return refused(
        2, {.ep_size = 2, .placement = PlacementStrategy::kCustom, .rank_of = std::move(ranks)});
  };
  EXPECT_EQ(custom({0, 1}), "accepted");
  EXPECT_EQ(custom({0}), "rank_of");
  EXPECT_EQ(custom({0, 2}), "rank_of");
  EXPECT_EQ(custom({0, -2}), "rank_of");
}

TEST(TensorSlice, AnySizes_CoverTheMatrixInOrder) {
  for (int64_t size = 0; size < 40; ++size) {
    for (int32_t ranks = 1; ranks < 45; ++ranks) {
      int64_t next = 0;
      for (int32_t rank = 0; rank < ranks; ++rank) {
        const TensorSlice slice = tensor_slice(size, rank, ranks);
        EXPECT_EQ(slice.begin, next);
        EXPECT_GE(slice.size(), size / ranks);
        EXPECT_LE(slice.size(), (size + ranks - 1) / ranks);
        next = slice.end;
      }
      EXPECT_EQ(next, size);
    }
  }
}

// Runs vLLM's test_expert_placement.py: its sizes, both strategies, every rank, against its
// formulas.
class VllmMatrixPlacement : public ::testing::TestWithParam<PlacementCase> {};

TEST_P(VllmMatrixPlacement, EveryRank_HoldsWhatItsFormulaSays) {
  const PlacementCase& c = GetParam();
  const ExpertPlacement p = place(c);
  const auto base = static_cast<int32_t>(c.num_experts) / c.num_ranks;
  const auto remainder = static_cast<int32_t>(c.num_experts) % c.num_ranks;
  for (int32_t rank = 0; rank < c.num_ranks; ++rank) {
    const int32_t held = base + (rank < remainder ? 1 : 0);
    std::vector<int32_t> expected(static_cast<size_t>(c.num_experts), -1);
    const bool linear = c.strategy == PlacementStrategy::kLinear;
    const int32_t first = linear ? rank * base + std::min(rank, remainder) : rank;
    for (int32_t local = 0; local < held; ++local) {
      expected[static_cast<size_t>(first + local * (linear ? 1 : c.num_ranks))] = local;
    }
    EXPECT_EQ(p.expert_map(rank), expected) << "rank " << rank;
  }
}

std::vector<PlacementCase> vllm_cases() {
  std::vector<PlacementCase> cases;
  for (const auto strategy : {PlacementStrategy::kLinear, PlacementStrategy::kRoundRobin}) {
    for (const int64_t experts : {4, 8, 9, 16, 17}) cases.push_back({experts, 2, strategy});
    for (const int64_t experts : {8, 16, 18, 32, 33}) cases.push_back({experts, 4, strategy});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Sizes, VllmMatrixPlacement, ::testing::ValuesIn(vllm_cases()),
                         [](const auto& row) {
                           return "E" + std::to_string(row.param.num_experts) + "Ranks" +
                                  std::to_string(row.param.num_ranks) +
                                  (row.param.strategy == PlacementStrategy::kLinear ? "Linear"
                                                                                    : "RoundRobin");
                         });

TEST(VllmMatrixPlacementSize, NoRanks_AreRefused) {
  EXPECT_EQ(refused_argument([] { place({8, 0, PlacementStrategy::kLinear}); }), "num_ranks");
  EXPECT_THROW(validate(ParallelSpec{.ep_size = 0}), Error);
}

}  // namespace
}  // namespace conclave

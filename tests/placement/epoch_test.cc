#include "placement/epoch.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <string>

namespace conclave {
namespace {

constexpr auto kCustom = PlacementStrategy::kCustom;

TEST(PlacementEpoch, First_IsThePlacementOfTheLayer) {
  const ParallelSpec parallel{.ep_size = 3, .num_redundant_experts = 2};
  const auto epoch = first_epoch(4, parallel);
  const ExpertPlacement placed = make_placement(4, parallel);
  EXPECT_EQ(epoch->number, 0U);
  EXPECT_EQ(epoch->experts.rank_of, placed.rank_of);
  EXPECT_EQ(epoch->experts.local_of, placed.local_of);
  EXPECT_TRUE(epoch->has_replicas());
  EXPECT_EQ(epoch->replicas.physical.size(), 6U);
  EXPECT_EQ(physical_expert(epoch->replicas, 3, 0), 3);
}

TEST(PlacementEpoch, WithoutRedundantExperts_ThereIsNoReplicaMap) {
  const auto epoch = first_epoch(5, {.ep_size = 2});
  EXPECT_FALSE(epoch->has_replicas());
  EXPECT_TRUE(epoch->replicas.physical.empty());
  EXPECT_THROW(first_epoch(5, {.ep_size = 2, .placement = kCustom, .rank_of = {0, 1}}), Error);
}

TEST(PlacementEpoch, AnotherOne_FollowsIfItFitsThePlannedPlaces) {
  const auto planned =
      first_epoch(4, {.ep_size = 2, .placement = kCustom, .rank_of = {0, 0, 1, 1}});
  const auto next = [](std::vector<int32_t> ranks, int32_t ep_size = 2) {
    return first_epoch(static_cast<int64_t>(ranks.size()),
                       {.ep_size = ep_size, .placement = kCustom, .rank_of = ranks});
  };
  EXPECT_TRUE(can_follow(*planned, *planned));
  EXPECT_TRUE(can_follow(*planned, *next({1, 0, 1, 0})));
  const auto reason = [&](const PlacementEpoch& epoch) {
    const Support support = can_follow(*planned, epoch);
    return support ? std::string("yes") : support.reason();
  };
  EXPECT_EQ(reason(*next({0, 0, 0, 1})), "rank 0 has places for 2 experts, the epoch gives 3");
  EXPECT_EQ(reason(*next({0, 0, 1})), "the plan is for 4 experts, the epoch has 3");
  EXPECT_EQ(reason(*next({0, 0, 1, 1}, 3)), "the plan is for 2 ranks, the epoch has 3");
  EXPECT_EQ(reason(*first_epoch(4, {.ep_size = 2, .num_redundant_experts = 1})),
            "the plan is for 4 physical experts, the epoch has 5");
  const auto copied = first_epoch(4, {.ep_size = 2, .num_redundant_experts = 1});
  EXPECT_EQ(can_follow(*first_epoch(4, {.ep_size = 2}), *copied).reason(),
            "the plan is for 4 physical experts, the epoch has 5");
  EXPECT_TRUE(can_follow(*copied, *first_epoch(4, {.ep_size = 2}))) << "replicas may be fewer";
}

}  // namespace
}  // namespace conclave

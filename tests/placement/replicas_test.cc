#include "placement/placement_cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace conclave {
namespace {

using testing::refused_argument;
using Ints = std::vector<int32_t>;

TEST(ReplicaHash, PublishedVectors_Agree) {
  EXPECT_EQ(replica_hash(0), 0U);
  EXPECT_EQ(replica_hash(1), 0x9E3779B9U);
  EXPECT_EQ(replica_hash(2), 0x3C6EF372U);
  // Above 32 bits, only the low half counts.
  EXPECT_EQ(replica_hash((int64_t{1} << 32) + 2), 0x3C6EF372U);
}

TEST(ReplicaMap, IdsOutsideTheLayer_ServeNothing) {
  const ReplicaMap map = make_replica_map(Ints{0, 1, 0}, 2);
  for (const int32_t id : {-1, -7, 2, 1 << 30}) EXPECT_EQ(physical_expert(map, id, 3), -1);
}

TEST(ReplicaMap, WrongEntries_AreRefused) {
  EXPECT_EQ(refused_argument([] { make_replica_map(Ints{0, 2}, 2); }), "logical_of");
  EXPECT_EQ(refused_argument([] { make_replica_map(Ints{0, -2}, 2); }), "logical_of");
}

// vLLM's test_routing.py maps logical to physical ids through these kinds of maps.
TEST(VllmMatrixReplicaMap, Identity_KeepsIds) {
  Ints identity(16);
  std::iota(identity.begin(), identity.end(), 0);
  const ReplicaMap map = make_replica_map(identity, 16);
  for (int32_t id = 0; id < 16; ++id) {
    for (const int64_t token : {0, 1, 2, 4095}) EXPECT_EQ(physical_expert(map, id, token), id);
  }
}

TEST(VllmMatrixReplicaMap, Shuffled_FollowsTheInverse) {
  Ints shuffled(16);
  std::iota(shuffled.begin(), shuffled.end(), 0);
  std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(7));
  const ReplicaMap map = make_replica_map(shuffled, 16);
  for (int32_t physical = 0; physical < 16; ++physical) {
    EXPECT_EQ(physical_expert(map, shuffled[static_cast<size_t>(physical)], 5), physical);
  }
}

TEST(VllmMatrixReplicaMap, Partial_ExpertsHeldNowhereServeNothing) {
  const ReplicaMap map = make_replica_map(Ints{3, -1, 0, -1}, 5);
  EXPECT_EQ(physical_expert(map, 0, 9), 2);
  EXPECT_EQ(physical_expert(map, 3, 9), 0);
  for (const int32_t id : {1, 2, 4}) EXPECT_EQ(physical_expert(map, id, 9), -1);
}

TEST(VllmMatrixReplicaMap, Uneven_TheHashChoosesAmongEachExpertsOwn) {
  // Expert 0 has four places, 1 has one, 2 has two.
  const Ints logical_of = {0, 0, 1, 2, 0, 2, 0};
  const ReplicaMap map = make_replica_map(logical_of, 3);
  const std::vector<Ints> places = {{0, 1, 4, 6}, {2}, {3, 5}};
  for (int64_t token = 0; token < 1000; ++token) {
    const auto hash = static_cast<uint32_t>(static_cast<uint64_t>(token) * 0x9E3779B9U);
    for (size_t id = 0; id < places.size(); ++id) {
      EXPECT_EQ(physical_expert(map, static_cast<int32_t>(id), token),
                places[id][hash % places[id].size()]);
    }
  }
}

TEST(VllmMatrixReplicaMap, Full_EveryReplicaOfTheInitialMapIsReached) {
  const ExpertPlacement p = make_placement(4, {.num_redundant_experts = 12});
  const ReplicaMap map = make_replica_map(p.logical_of, 4);
  std::vector<int> used(16, 0);
  for (int64_t token = 0; token < 64; ++token) {
    for (int32_t id = 0; id < 4; ++id) ++used[static_cast<size_t>(physical_expert(map, id, token))];
  }
  EXPECT_EQ(std::count(used.begin(), used.end(), 0), 0);
}

struct HotExpert {
  int64_t top_k;
  int32_t replicas;
};

// 8192 tokens and 16 logical experts, one of them hot with `replicas` places over which its rows
// must be spread evenly.
class VllmMatrixHotExpert : public ::testing::TestWithParam<HotExpert> {};

TEST_P(VllmMatrixHotExpert, RowsOfItsReplicas_AreBalanced) {
  const auto [top_k, replicas] = GetParam();
  constexpr int32_t kHot = 3;
  ParallelSpec parallel{.num_redundant_experts = replicas - 1};
  parallel.replica_of.assign(static_cast<size_t>(replicas - 1), kHot);
  const ExpertPlacement p = make_placement(16, parallel);
  const ReplicaMap map = make_replica_map(p.logical_of, 16);
  std::vector<int64_t> load(static_cast<size_t>(p.num_physical()), 0);
  for (int64_t token = 0; token < 8192; ++token) {
    for (int64_t slot = 0; slot < top_k; ++slot) {
      // Every token names the hot expert first, then its neighbours.
      const auto id = static_cast<int32_t>((kHot + slot) % 16);
      ++load[static_cast<size_t>(physical_expert(map, id, token))];
    }
  }
  int64_t largest = 0;
  int64_t total = 0;
  for (size_t physical = 0; physical < load.size(); ++physical) {
    if (p.logical_of[physical] != kHot) continue;
    largest = std::max(largest, load[physical]);
    total += load[physical];
  }
  EXPECT_EQ(total, 8192);
  const double mean = static_cast<double>(total) / replicas;
  EXPECT_LT(static_cast<double>(largest) / mean, 1.15);
}

INSTANTIATE_TEST_SUITE_P(Cases, VllmMatrixHotExpert,
                         ::testing::Values(HotExpert{2, 2}, HotExpert{4, 2}, HotExpert{8, 4},
                                           HotExpert{8, 8}),
                         [](const auto& row) {
                           return "K" + std::to_string(row.param.top_k) + "R" +
                                  std::to_string(row.param.replicas);
                         });

}  // namespace
}  // namespace conclave

// Compares grouping on the device with a stable sort on the host.
#include "dispatch/cuda/catalog.h"
#include "dispatch/cuda/group_shape.h"
#include "support/cuda/device_array.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace conclave::dispatch {
namespace {

using testing::DeviceArray;

struct GroupProblem {
  int64_t num_tokens = 0;
  int32_t top_k = 1;
  int32_t num_experts = 8;
  int32_t tile_tokens = 16;
  int64_t live = -1;  // tokens that count; -1: no counter
  std::vector<int32_t> ids = {};
  std::vector<int32_t> local_expert = {};  // empty: the id itself
  std::vector<int64_t> wide_ids = {};      // replace ids, if there are any
  int32_t skewed_tile_tokens = 0;          // used for more than skewed_from tiles
  int64_t skewed_from = 0;

  int32_t num_local() const {
    if (local_expert.empty()) return num_experts;
    return *std::max_element(local_expert.begin(), local_expert.end()) + 1;
  }
};

struct Grouped {
  std::vector<int32_t> expert_begin = {};
  std::vector<int32_t> row_slot = {};
  std::vector<int32_t> slot_row = {};
  std::vector<int32_t> tiles = {};  // four words each
  std::vector<int64_t> load = {};
  uint64_t skipped = 0;
  bool is_skewed = false;
  friend bool operator==(const Grouped&, const Grouped&) = default;
};

Grouped expected(const GroupProblem& problem) {
  const auto experts = static_cast<size_t>(problem.num_local());
  std::vector<std::vector<int32_t>> slots(experts);
  Grouped result;
  result.load.assign(static_cast<size_t>(problem.num_experts), 0);
  const int64_t live = problem.live < 0 ? problem.num_tokens : problem.live;
  for (int64_t slot = 0; slot < live * problem.top_k; ++slot) {
    const auto at = static_cast<size_t>(slot);
    const int64_t given = problem.wide_ids.empty() ? problem.ids[at] : problem.wide_ids[at];
    if (given < 0 || given >= problem.num_experts) {
      result.skipped += given != -1 ? 1 : 0;
      continue;
    }
    const auto id = static_cast<int32_t>(given);
    ++result.load[static_cast<size_t>(id)];
    const int32_t local =
        problem.local_expert.empty() ? id : problem.local_expert[static_cast<size_t>(id)];
    if (local >= 0) slots[static_cast<size_t>(local)].push_back(static_cast<int32_t>(slot));
  }
  int64_t plain_tiles = 0;
  for (const std::vector<int32_t>& of_expert : slots) {
    const auto count = static_cast<int64_t>(of_expert.size());
    plain_tiles += (count + problem.tile_tokens - 1) / problem.tile_tokens;
  }
  result.is_skewed = problem.skewed_tile_tokens > 0 && plain_tiles > problem.skewed_from;
  const int32_t tile = result.is_skewed ? problem.skewed_tile_tokens : problem.tile_tokens;
  for (size_t e = 0; e < experts; ++e) {
    const auto begin = static_cast<int32_t>(result.row_slot.size());
    const auto count = static_cast<int32_t>(slots[e].size());
    result.expert_begin.push_back(begin);
    result.row_slot.insert(result.row_slot.end(), slots[e].begin(), slots[e].end());
    for (int32_t at = 0; at < count; at += tile) {
      result.tiles.insert(result.tiles.end(),
                          {static_cast<int32_t>(e), begin + at, std::min(tile, count - at), 0});
    }
  }
  result.expert_begin.push_back(static_cast<int32_t>(result.row_slot.size()));
  result.slot_row.assign(static_cast<size_t>(problem.num_tokens * problem.top_k), -1);
  for (size_t row = 0; row < result.row_slot.size(); ++row) {
    result.slot_row[static_cast<size_t>(result.row_slot[row])] = static_cast<int32_t>(row);
  }
  return result;
}

class DeviceGroup : public testing::DeviceTest {
 protected:
  // With 0 threads, in the shape that a plan chooses.
  Grouped run(const GroupProblem& problem, GroupShape shape = {.blocks = 0, .threads = 0}) {
    const int32_t least_tile = problem.skewed_tile_tokens == 0
                                   ? problem.tile_tokens
                                   : std::min(problem.tile_tokens, problem.skewed_tile_tokens);
    const size_t bytes = device_group_workspace_bytes(problem.num_tokens, problem.top_k,
                                                      problem.num_local(), least_tile);
    const DeviceArray<uint8_t> workspace(bytes);
    const DeviceArray<int32_t> ids(problem.ids);
    const DeviceArray<int64_t> wide_ids(problem.wide_ids);
    const DeviceArray<int32_t> narrow_ids(problem.wide_ids.size());
    const DeviceArray<uint64_t> skipped(std::vector<uint64_t>{0});
    const DeviceArray<int32_t> map(problem.local_expert);
    const DeviceArray<int64_t> live(std::vector<int64_t>{problem.live});
    const DeviceArray<int64_t> load(
        std::vector<int64_t>(static_cast<size_t>(problem.num_experts), 0));
    DeviceGroupArgs args{.topk_ids = or_null(ids),
                         .wide_ids = or_null(wide_ids),
                         .narrow_ids = or_null(narrow_ids),
                         .num_tokens = problem.num_tokens,
                         .live_tokens = problem.live < 0 ? nullptr : live.data(),
                         .top_k = problem.top_k,
                         .local_expert = or_null(map),
                         .num_experts = problem.num_experts,
                         .num_local_experts = problem.num_local(),
                         .tile_tokens = problem.tile_tokens,
                         .expert_load = load.data(),
                         .skipped_ids = skipped.data(),
                         .workspace = workspace.data(),
                         .skewed_tile_tokens = problem.skewed_tile_tokens,
                         .skewed_from = problem.skewed_from};
    args.launches = group_launches(problem.num_tokens, problem.top_k, problem.num_local());
    if (shape.threads != 0) {
      shape.shared_bytes = group_shared_bytes(shape.threads, problem.num_local());
      args.launches.shape = shape;
    }
    prepare_group_kernels(args.launches.shape);
    const GroupedRows rows = device_group(args, stream());
    wait();
    workspace.expect_guard_untouched();
    expect_narrowed(problem, narrow_ids);
    Grouped result = fetch(rows, problem, load.download());
    result.skipped = skipped.download()[0];
    return result;
  }

 private:
  static void expect_narrowed(const GroupProblem& problem, const DeviceArray<int32_t>& ids) {
    const int64_t live = problem.live < 0 ? problem.num_tokens : problem.live;
    ids.expect_guard_untouched();
    const std::vector<int32_t> narrowed = ids.download();
    for (size_t i = 0; i < narrowed.size() && i < static_cast<size_t>(live * problem.top_k); ++i) {
      const int64_t given = problem.wide_ids[i];
      ASSERT_EQ(narrowed[i], given >= 0 && given < problem.num_experts ? given : -1) << i;
    }
  }

  static Grouped fetch(const GroupedRows& rows, const GroupProblem& problem,
                       std::vector<int64_t> load) {
    const auto experts = static_cast<size_t>(problem.num_local());
    Grouped result{.load = std::move(load)};
    result.expert_begin = DeviceArray<int32_t>::download(rows.expert_begin, experts + 1);
    const int32_t count = result.expert_begin.back();
    int32_t tiles = DeviceArray<int32_t>::download(rows.num_tiles, 1)[0];
    if (problem.skewed_tile_tokens > 0) {
      const int32_t skewed = DeviceArray<int32_t>::download(rows.num_skewed_tiles, 1)[0];
      EXPECT_TRUE(tiles == 0 || skewed == 0) << tiles << " and " << skewed;
      result.is_skewed = skewed > 0;
      tiles += skewed;
    }
    EXPECT_TRUE(count >= 0 && count <= rows.max_rows) << count;
    EXPECT_TRUE(tiles >= 0 && tiles <= rows.max_tiles) << tiles;
    if (::testing::Test::HasFailure()) return result;
    result.row_slot = DeviceArray<int32_t>::download(rows.row_slot, static_cast<size_t>(count));
    result.slot_row = DeviceArray<int32_t>::download(
        rows.slot_row, static_cast<size_t>(problem.num_tokens * problem.top_k));
    static_assert(sizeof(TokenTile) == 4 * sizeof(int32_t));
    const auto* words = static_cast<const int32_t*>(static_cast<const void*>(rows.tiles));
    result.tiles = DeviceArray<int32_t>::download(words, static_cast<size_t>(tiles) * 4);
    return result;
  }
};

std::string describe(const GroupProblem& problem) {
  return "T " + std::to_string(problem.num_tokens) + ", k " + std::to_string(problem.top_k) +
         ", E " + std::to_string(problem.num_experts) + " (" + std::to_string(problem.num_local()) +
         " local), tile " + std::to_string(problem.tile_tokens) + ", live " +
         std::to_string(problem.live);
}

// Ids of all kinds: mostly valid, some -1, some far out of range.
std::vector<int32_t> random_ids(int64_t count, int32_t experts, std::mt19937& generator) {
  const std::vector<int32_t> hostile = {-1,
                                        -1,
                                        -2,
                                        experts,
                                        experts + 1,
                                        std::numeric_limits<int32_t>::min(),
                                        std::numeric_limits<int32_t>::max()};
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) {
    const bool bad = generator() % 16 == 0;
    id = bad ? hostile[generator() % hostile.size()]
             : static_cast<int32_t>(generator() % static_cast<uint32_t>(experts));
  }
  return ids;
}

GroupProblem random_problem(int64_t tokens, int32_t top_k, int32_t experts, uint32_t seed) {
  std::mt19937 generator(seed);
  const std::vector<int32_t> tiles = {8, 16, 24, 64, 128, 1};
  GroupProblem problem{.num_tokens = tokens,
                       .top_k = top_k,
                       .num_experts = experts,
                       .tile_tokens = tiles[generator() % tiles.size()]};
  problem.ids = random_ids(tokens * top_k, experts, generator);
  if (generator() % 3 == 0) {
    problem.live = static_cast<int64_t>(generator() % static_cast<uint32_t>(tokens + 1));
  }
  if (generator() % 3 == 0) {
    int32_t next = 0;
    for (int32_t e = 0; e < experts; ++e) {
      problem.local_expert.push_back(generator() % 2 == 0 ? next++ : -1);
    }
  }
  return problem;
}

TEST_F(DeviceGroup, RandomProblems_EqualAStableSort) {
  const std::vector<int64_t> tokens = {0, 1, 2, 31, 32, 33, 257, 1000};
  const std::vector<int32_t> top_k = {1, 2, 3, 5, 8, 32};
  const std::vector<int32_t> experts = {1, 2, 6, 10, 60, 128, 256, 1024};
  uint32_t seed = 0;
  for (const int64_t t : tokens) {
    for (const int32_t k : top_k) {
      const GroupProblem problem = random_problem(t, k, experts[seed % experts.size()], seed);
      ++seed;
      ASSERT_EQ(run(problem), expected(problem)) << describe(problem) << ", seed " << seed - 1;
    }
  }
}

// Covers every shape (one block, a cluster, counts first), and both sides of the limit and the
// limit itself.
TEST_F(DeviceGroup, MoreTilesThanEvenChoicesMake_AreCutForTheOtherKernel) {
  int skewed = 0;
  int plain = 0;
  for (const auto& [tokens, top_k, experts] : std::vector<std::tuple<int64_t, int32_t, int32_t>>{
           {1, 1, 1}, {40, 3, 6}, {300, 8, 60}, {2000, 6, 128}, {9000, 4, 256}, {16384, 8, 10}}) {
    for (const auto& [tile, other] :
         std::vector<std::pair<int32_t, int32_t>>{{16, 128}, {96, 128}, {160, 128}, {64, 24}}) {
      GroupProblem problem = random_problem(tokens, top_k, experts, 7);
      problem.tile_tokens = tile;
      const auto tiles = static_cast<int64_t>(expected(problem).tiles.size() / 4);
      problem.skewed_tile_tokens = other;
      for (const int64_t from : {int64_t{0}, tiles - 1, tiles, tiles + 1}) {
        problem.skewed_from = std::max<int64_t>(from, 0);
        const Grouped wanted = expected(problem);
        ASSERT_EQ(run(problem), wanted)
            << describe(problem) << ", other " << other << ", from " << from;
        (wanted.is_skewed ? skewed : plain) += 1;
      }
    }
  }
  EXPECT_GT(skewed, 20);
  EXPECT_GT(plain, 20);
}

TEST_F(DeviceGroup, WideIds_AreComparedIn64Bits) {
  for (const int64_t tokens : {1, 33, 300, 4000}) {
    GroupProblem problem = random_problem(tokens, 6, 40, static_cast<uint32_t>(tokens));
    for (size_t i = 0; i < problem.ids.size(); ++i) {
      // The id is valid once truncated.
      const int64_t high = i % 7 == 0 ? int64_t{1} << (32 + i % 31) : 0;
      problem.wide_ids.push_back(problem.ids[i] + high);
    }
    problem.ids.clear();
    ASSERT_EQ(run(problem), expected(problem)) << describe(problem);
  }
}

TEST_F(DeviceGroup, ManySlots_EqualAStableSort) {
  for (const auto& [tokens, top_k, experts] : std::vector<std::tuple<int64_t, int32_t, int32_t>>{
           {16384, 8, 128}, {16384, 32, 1024}, {100003, 3, 7}, {2049, 2, 256}}) {
    const GroupProblem problem = random_problem(tokens, top_k, experts, 99);
    ASSERT_EQ(run(problem), expected(problem)) << describe(problem);
  }
}

TEST_F(DeviceGroup, EveryShape_GivesTheSameOrder) {
  for (const int32_t blocks : {1, 2, 4, 8}) {
    for (const int32_t threads : {128, 512, 1024}) {
      const GroupProblem problem = random_problem(777, 6, 100, 5);
      const Grouped wanted = expected(problem);
      ASSERT_EQ(run(problem, {.blocks = blocks, .threads = threads, .cluster = blocks}), wanted)
          << blocks << " blocks of " << threads;
      ASSERT_EQ(run(problem, {.blocks = 7 * blocks, .threads = threads}), wanted)
          << 7 * blocks << " counted blocks of " << threads;
    }
  }
}

TEST_F(DeviceGroup, AllTokensOnOneExpert_FillWholeTiles) {
  for (const int64_t tokens : {15, 16, 17, 5000}) {
    GroupProblem problem{.num_tokens = tokens, .top_k = 2, .num_experts = 60};
    problem.ids.assign(static_cast<size_t>(tokens * 2), 41);
    ASSERT_EQ(run(problem), expected(problem)) << describe(problem);
  }
}

TEST_F(DeviceGroup, AllIdsNowhere_GiveNoRowsAndNoTiles) {
  for (const int32_t id : {-1, 60, std::numeric_limits<int32_t>::min()}) {
    GroupProblem problem{.num_tokens = 100, .top_k = 4, .num_experts = 60};
    problem.ids.assign(400, id);
    ASSERT_EQ(run(problem), expected(problem)) << id;
  }
}

TEST_F(DeviceGroup, NoLocalExperts_GiveNoRows) {
  GroupProblem problem{.num_tokens = 9, .top_k = 2, .num_experts = 4};
  problem.local_expert.assign(4, -1);
  problem.ids.assign(18, 3);
  ASSERT_EQ(problem.num_local(), 0);
  ASSERT_EQ(run(problem), expected(problem));
}

TEST_F(DeviceGroup, ThousandRuns_GiveOneResult) {
  const GroupProblem problem = random_problem(600, 8, 128, 3);
  const Grouped first = run(problem);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(run(problem), first) << "run " << i;
}

TEST(GroupLayout, TooManySlotsOrExperts_AreTypedErrors) {
  EXPECT_THROW(device_group_workspace_bytes(int64_t{1} << 28, 8, 4, 16), Error);
  EXPECT_THROW(device_group_workspace_bytes(int64_t{1} << 62, 8, 4, 16), Error);
  EXPECT_THROW(device_group_workspace_bytes(16, 8, 1025, 16), Error);
  EXPECT_GT(device_group_workspace_bytes(16, 8, 1024, 16), 16U * 8U * 4U);
}

}  // namespace
}  // namespace conclave::dispatch

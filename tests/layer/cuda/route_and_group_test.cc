// Compares routing and grouping in one launch with the two apart, bit for bit.
#include "layer/cuda/route_and_group.h"

#include "dispatch/cuda/catalog.h"
#include "routing/random_spec.h"
#include "support/cuda/device_array.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::DeviceArray;
using testing::RoutingProblem;

constexpr int32_t kTile = 16;
// For batches with more tiles than experts.
constexpr int32_t kSkewedTile = 24;

struct Grouped {
  std::vector<int32_t> ids = {};
  std::vector<float> weights = {};
  std::vector<int32_t> expert_begin = {};
  std::vector<int32_t> row_slot = {};
  std::vector<int32_t> slot_row = {};
  std::vector<int32_t> tiles = {};
  std::vector<int64_t> load = {};
  int32_t num_tiles = 0;
  int32_t num_skewed_tiles = 0;
  friend bool operator==(const Grouped&, const Grouped&) = default;
};

enum class Launches : uint8_t { kOne, kTwo, kChosen };

class RouteAndGroup : public testing::DeviceTest {
 protected:
  static dispatch::GroupShape chosen_shape(const routing::DeviceRoutePlan& plan, int64_t experts,
                                           int64_t tokens) {
    return route_group_ladder({.route = &plan,
                               .num_local_experts = experts,
                               .max_tokens = tokens,
                               .cluster_blocks = find_cluster_blocks()})
        .back()
        .shape;
  }

  // Shared experts have ids behind the routed ones, and a slot of every token each.
  Grouped run(const RoutingProblem& problem, Launches launches,
              dispatch::GroupShape shape = {.blocks = 0}, int32_t num_shared = 0) {
    const MoeSpec& spec = problem.spec;
    const int64_t tokens = problem.num_tokens();
    const int64_t top_k = spec.top_k + num_shared;
    const auto slots = static_cast<size_t>(tokens * top_k);
    const auto experts = static_cast<size_t>(spec.num_experts + num_shared);
    const DeviceArray<float> logits(problem.logits);
    const DeviceArray<float> bias(problem.selection_bias);
    const DeviceArray<float> expert_scale(problem.expert_scale);
    const DeviceArray<float> global_scale(problem.global_scale);
    const DeviceArray<int32_t> ids(slots);
    const DeviceArray<float> weights(slots);
    const DeviceArray<int64_t> load(std::vector<int64_t>(static_cast<size_t>(spec.num_experts), 0));
    const DeviceArray<uint8_t> workspace(dispatch::device_group_workspace_bytes(
        tokens, top_k, static_cast<int64_t>(experts), kTile));
    const routing::DeviceRouteArgs route{
        .logits = logits.data(),
        .logits_stride = num_logits(spec),
        .num_tokens = tokens,
        .selection_bias = or_null(bias),
        .expert_scale = or_null(expert_scale),
        .global_scale = or_null(global_scale),
        .shared = {.count = num_shared, .first_id = static_cast<int32_t>(spec.num_experts)},
        .topk_ids = ids.data(),
        .topk_weights = weights.data()};
    dispatch::DeviceGroupArgs group{.num_experts = static_cast<int32_t>(experts),
                                    .num_local_experts = static_cast<int32_t>(experts),
                                    .tile_tokens = kTile,
                                    .expert_load = load.data(),
                                    .num_counted = static_cast<int32_t>(spec.num_experts),
                                    .workspace = workspace.data(),
                                    .skewed_tile_tokens = kSkewedTile,
                                    .skewed_from = spec.num_experts};
    const routing::DeviceRoutePlan plan = routing::plan_device_route(spec);
    group.launches = dispatch::group_launches(tokens, top_k, group.num_local_experts);
    prepare_group_kernels(group.launches.shape);
    GroupedRows rows;
    if (launches == Launches::kChosen) {
      shape = chosen_shape(plan, group.num_local_experts, tokens);
    }
    if (launches == Launches::kOne) {
      shape.shared_bytes = route_and_group_shared_bytes(plan, shape, group.num_local_experts);
    }
    if (launches != Launches::kTwo) {
      if (shape.blocks > 0) prepare_route_and_group(plan, shape);
      group.launches.routed = shape;
      rows = device_route_and_group(plan, route, group, stream());
    } else {
      routing::device_route(plan, route, stream());
      group.topk_ids = ids.data();
      group.num_tokens = tokens;
      group.top_k = static_cast<int32_t>(top_k);
      rows = dispatch::device_group(group, stream());
    }
    wait();
    workspace.expect_guard_untouched();
    load.expect_guard_untouched();
    Grouped result{.ids = ids.download(), .weights = weights.download()};
    result.expert_begin = DeviceArray<int32_t>::download(rows.expert_begin, experts + 1);
    const auto count = static_cast<size_t>(result.expert_begin.back());
    EXPECT_LE(count, slots);
    if (HasFailure()) return result;
    result.row_slot = DeviceArray<int32_t>::download(rows.row_slot, count);
    result.slot_row = DeviceArray<int32_t>::download(rows.slot_row, slots);
    result.num_tiles = DeviceArray<int32_t>::download(rows.num_tiles, 1)[0];
    result.num_skewed_tiles = DeviceArray<int32_t>::download(rows.num_skewed_tiles, 1)[0];
    EXPECT_TRUE(result.num_tiles == 0 || result.num_skewed_tiles == 0);
    const auto tiles = static_cast<size_t>(result.num_tiles + result.num_skewed_tiles);
    const auto* words = static_cast<const int32_t*>(static_cast<const void*>(rows.tiles));
    result.tiles = DeviceArray<int32_t>::download(words, tiles * 4);
    result.load = load.download();
    return result;
  }
};

TEST_F(RouteAndGroup, RandomSpecs_EqualTwoLaunches) {
  const std::vector<int64_t> tokens = {1, 2, 8, 9, 33, 200, 257, 512, 600};
  for (uint32_t seed = 0; seed < 150; ++seed) {
    std::mt19937 generator(seed);
    const MoeSpec spec = testing::random_topk_spec(generator);
    const RoutingProblem problem =
        testing::random_problem(spec, tokens[seed % tokens.size()], 1.0F, seed);
    ASSERT_EQ(run(problem, Launches::kChosen), run(problem, Launches::kTwo))
        << "seed " << seed << ": " << testing::describe(spec);
  }
}

TEST_F(RouteAndGroup, EveryShape_GivesTheSame) {
  MoeSpec spec = testing::router_spec(256, 8, Renormalize::kSum);
  spec.router.score = RouterScore::kSigmoid;
  spec.router.has_selection_bias = true;
  spec.router.num_groups = 8;
  spec.router.topk_groups = 4;
  for (const int64_t tokens : {1, 7, 15, 16}) {
    const RoutingProblem problem = testing::random_problem(spec, tokens, 1.0F, 3);
    const Grouped wanted = run(problem, Launches::kTwo);
    for (const int32_t blocks : {1, 2, 4, 8}) {
      const dispatch::GroupShape shape = {.blocks = blocks, .threads = 512, .cluster = blocks};
      ASSERT_EQ(run(problem, Launches::kOne, shape), wanted) << blocks << " blocks, T " << tokens;
    }
  }
}

TEST_F(RouteAndGroup, TokensAroundWholeBlocks_EqualTwoLaunches) {
  const MoeSpec spec = testing::router_spec(60, 5, Renormalize::kSum);
  for (const int64_t tokens : {8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257}) {
    const RoutingProblem problem = testing::random_problem(spec, tokens, 1.0F, 3);
    ASSERT_EQ(run(problem, Launches::kChosen), run(problem, Launches::kTwo)) << tokens;
  }
}

TEST_F(RouteAndGroup, EveryTokenOnTheSameExperts_FillsWholeTiles) {
  const MoeSpec spec = testing::router_spec(64, 8, Renormalize::kSum);
  for (const int64_t tokens : {15, 17, 256}) {
    RoutingProblem problem = testing::random_problem(spec, tokens, 1.0F, 3);
    for (size_t i = 0; i < problem.logits.size(); ++i) {
      problem.logits[i] = i % 64 < 8 ? 9.0F + static_cast<float>(i % 64) : 0.0F;
    }
    ASSERT_EQ(run(problem, Launches::kChosen), run(problem, Launches::kTwo)) << tokens;
  }
}

// Slots of shared experts have rows and tiles, but only routed experts are counted.
TEST_F(RouteAndGroup, SharedSlots_AreGroupedAndNotCounted) {
  const MoeSpec spec = testing::router_spec(60, 5, Renormalize::kSum);
  for (const int64_t tokens : {1, 8, 64}) {
    const RoutingProblem problem = testing::random_problem(spec, tokens, 1.0F, 3);
    const Grouped wanted = run(problem, Launches::kTwo, {.blocks = 0}, 2);
    ASSERT_EQ(wanted.row_slot.size(), static_cast<size_t>(tokens * 7));
    ASSERT_EQ(std::accumulate(wanted.load.begin(), wanted.load.end(), int64_t{0}), tokens * 5);
    ASSERT_EQ(run(problem, Launches::kChosen, {.blocks = 0}, 2), wanted) << tokens;
  }
}

TEST_F(RouteAndGroup, ManyExperts_EqualTwoLaunches) {
  for (const int64_t experts : {8, 64, 128, 384, 512, 513, 1024}) {
    MoeSpec spec = testing::router_spec(experts, 8, Renormalize::kSum);
    const RoutingProblem problem = testing::random_problem(spec, 64, 1.0F, 3);
    ASSERT_EQ(run(problem, Launches::kChosen), run(problem, Launches::kTwo)) << experts;
  }
}

}  // namespace
}  // namespace conclave

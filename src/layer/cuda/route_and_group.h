// Makes ids, weights and the permutation from logits, in as few launches as possible.
#pragma once

#include "core/catalog.h"
#include "dispatch/cuda/group.h"
#include "layer/cuda/route_group_shape.h"
#include "routing/cuda/route.h"

#include "conclave/error.h"

#include <cstdint>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

struct RouteGroupProblem {
  const routing::DeviceRoutePlan* route = nullptr;  // null: other launches choose the experts
  int64_t num_local_experts = 0;
  int64_t max_tokens = 0;
  int32_t cluster_blocks = 8;                 // the most that the device can hold
  int64_t shared_bytes = int64_t{227} << 10;  // that a block of the device may have
  bool has_replicas = false;                  // are chosen between routing and grouping
};

// "cuda.route_with_group" does both in one launch, "cuda.route_then_group" supports everything.
struct RouteGroupRow {
  std::string_view name;
  Support (*supports)(const RouteGroupProblem& problem);
  // The shape for a call; blocks is 0 if the row takes no call of so many tokens, or has no shape
  // of its own.
  dispatch::GroupShape (*shape)(const RouteGroupProblem& problem, int64_t num_tokens);
  std::string_view reason;  // why it is chosen where it serves
};
Catalog<RouteGroupRow> route_group_catalog();

// The choice for calls of up to `last_tokens` tokens, above those of the rung before.
struct RouteGroupRung {
  int64_t last_tokens = 0;
  const RouteGroupRow* row = nullptr;
  dispatch::GroupShape shape;  // GroupLaunches::routed
};
// Ascending, the last rung for max_tokens; neighbours that agree are one rung.
std::vector<RouteGroupRung> route_group_ladder(const RouteGroupProblem& problem);

// The shape of the single launch; blocks is 0 if the problem does not fit one.
dispatch::GroupShape route_and_group_shape(const routing::DeviceRoutePlan& plan, int64_t num_tokens,
                                           int64_t num_local_experts);
// The shared memory of a launch of so many blocks and threads.
size_t route_and_group_shared_bytes(const routing::DeviceRoutePlan& plan,
                                    const dispatch::GroupShape& shape, int64_t num_local_experts);

// Asks the driver for the largest cluster of blocks, each of a multiprocessor and with
// kMaxRouteGroupSharedBytes, that the current device can hold: 8 or 16. Takes longer than a launch
// and may allocate.
int32_t find_cluster_blocks();
// Lets the single launch have the shape. Called on the current device before its first use there.
void prepare_route_and_group(const routing::DeviceRoutePlan& plan,
                             const dispatch::GroupShape& shape);
// Routes, then groups route.topk_ids: in one launch of the shape group.launches.routed if it has
// blocks, otherwise by device_route and device_group. Given ids may name an expert twice, which the
// single launch cannot group: they always take two. group.topk_ids, num_tokens, live_tokens and
// top_k (with the shared slots) are taken from `route` and need not be set.
GroupedRows device_route_and_group(const routing::DeviceRoutePlan& plan,
                                   const routing::DeviceRouteArgs& route,
                                   const dispatch::DeviceGroupArgs& group, CUstream_st* stream);

}  // namespace conclave::inline v0

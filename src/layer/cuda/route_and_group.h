// Makes ids, weights and the permutation from logits, in as few launches as possible.
#pragma once

#include "dispatch/cuda/group.h"
#include "dispatch/cuda/group_shape.h"
#include "routing/cuda/route.h"

#include <cstdint>

namespace conclave::inline v0 {

// Routes, then groups route.topk_ids: in one launch if slots are few, otherwise by device_route and
// device_group. group.topk_ids, num_tokens, live_tokens and top_k (with the shared slots) are taken
// from `route` and need not be set.
GroupedRows device_route_and_group(const routing::DeviceRoutePlan& plan,
                                   const routing::DeviceRouteArgs& route,
                                   const dispatch::DeviceGroupArgs& group, CUstream_st* stream);

// The shape of the single launch; blocks is 0 if the problem does not fit one.
dispatch::GroupShape route_and_group_shape(const routing::DeviceRoutePlan& plan, int64_t num_tokens,
                                           int64_t num_local_experts);
// Runs the single launch in the caller's shape.
GroupedRows device_route_and_group(const routing::DeviceRoutePlan& plan,
                                   const routing::DeviceRouteArgs& route,
                                   const dispatch::DeviceGroupArgs& group,
                                   const dispatch::GroupShape& shape, CUstream_st* stream);

}  // namespace conclave::inline v0

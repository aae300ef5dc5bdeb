// From logits to ids, weights and the permutation, in as few launches as they fit.
#pragma once

#include "dispatch/cuda/group.h"
#include "dispatch/cuda/group_shape.h"
#include "routing/cuda/device_router.h"

#include "conclave/spec.h"

#include <cstdint>

namespace conclave::inline v0 {

// Routes, then groups route.topk_ids: in one launch where slots are few, else device_route and
// device_group. group.topk_ids, num_tokens, live_tokens and top_k (with the shared slots) are those
// of `route` and need not be set.
GroupedRows device_route_and_group(const MoeSpec& spec, const routing::DeviceRouteArgs& route,
                                   const dispatch::DeviceGroupArgs& group, CUstream_st* stream);

// How the one launch is cut; blocks 0: it does not fit one.
dispatch::GroupShape route_and_group_shape(const MoeSpec& spec, int64_t num_tokens,
                                           int64_t num_local_experts);
// The one launch, cut as the caller says.
GroupedRows device_route_and_group(const MoeSpec& spec, const routing::DeviceRouteArgs& route,
                                   const dispatch::DeviceGroupArgs& group,
                                   const dispatch::GroupShape& shape, CUstream_st* stream);

}  // namespace conclave::inline v0

// The steps of a chunk that only a split layer has: from logical to physical experts, and the sum
// over tensor-parallel ranks.
#pragma once

#include "placement/epoch.h"

#include "conclave/comm.h"
#include "conclave/routing.h"

#include <cstdint>
#include <span>

namespace conclave::inline v0 {

// The routing with each id replaced by its physical expert, at `ids`, for the dispatcher; -1 stays.
// The replica depends only on the token's number in the call, from first_token on, of which each
// has rows_per_token rows of the routing. Without redundant experts: `routing`.
struct ReplicaChoice {
  const PlacementEpoch& epoch;
  int64_t first_token = 0;
  int64_t rows_per_token = 1;
};
Routing route_to_replicas(const ReplicaChoice& choice, const Routing& routing, int32_t* ids);

// The sum of `rows` over the ranks of `communicator`, at `sums`, with the same bits on every rank;
// `rows` itself if it is null or if there are no rows. Collective.
const float* sum_over_tensor_ranks(Communicator* communicator, std::span<const float> rows,
                                   float* sums);

}  // namespace conclave::inline v0

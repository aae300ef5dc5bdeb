// The steps of a chunk that only a split layer has: from logical to physical experts, and the sum
// over tensor-parallel ranks.
#pragma once

#include "layer/stages/chunk.h"

#include <cstdint>

namespace conclave::inline v0 {

// The routing with each id replaced by its physical expert, for the dispatcher; -1 stays. The
// replica depends only on the token's number in the call. Without redundant experts: `routing`.
Routing route_to_replicas(const PipelineArgs& args, const Routing& routing);

// The sum of `rows` [count * row_elements] over the tensor-parallel ranks, at `destination`, with
// the same bits on every rank; `rows` itself if the layer does not reduce or there are no rows.
// Collective.
const float* sum_over_tensor_ranks(const PipelineArgs& args, const float* rows,
                                   int64_t row_elements, const WorkspaceSlice& destination);

}  // namespace conclave::inline v0

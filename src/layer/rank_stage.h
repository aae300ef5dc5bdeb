// The steps of a chunk that exist only where a layer is split: from logical to physical experts,
// and the sum over tensor-parallel ranks.
#pragma once

#include "layer/pipeline.h"

#include <cstdint>

namespace conclave::inline v0 {

// The routing with the physical expert of each id, as the dispatcher wants it; -1 stays. The
// replica depends on the token's number in the call alone. Without redundant experts: `routing`.
Routing route_to_replicas(const PipelineArgs& args, const Routing& routing);

// The sum of `rows` [count * row_elements] over the tensor-parallel ranks, at `destination`. The
// same bits on every rank. Where the layer does not reduce, or without rows: `rows`. Collective.
const float* sum_over_tensor_ranks(const PipelineArgs& args, const float* rows,
                                   int64_t row_elements, const WorkspaceSlice& destination);

}  // namespace conclave::inline v0

// Stage one: from the caller's routing, logits or hidden rows to checked ids and weights.
#pragma once

#include "layer/pipeline.h"

namespace conclave::inline v0 {

// Ids in the result lie in [0, E + Z) or are -1; padding tokens have only -1. Weights of shared
// experts are there for SharedMode::kRouterWeight and kFusedSlots. Given ids without weights are
// weighed by the router. Fills the captures and adds to the expert load. `rows` are the chunk's
// hidden rows in the kernel's format. Throws Error(kExpertId) where a custom router breaks its
// contract under IdPolicy::kStrict.
Routing route_chunk(const PipelineArgs& args, const RowBundle& rows, ForwardCounters& counters);

// Float32 rows for a gate product: `rows` themselves where they already are, else converted.
RowBundle float_rows(const PipelineArgs& args, const RowBundle& rows);

// The chunk's rows of a [T, n] argument.
ConstTensorView chunk_rows(const ConstTensorView& tensor, const TokenChunk& chunk);
TensorView chunk_rows(const TensorView& tensor, const TokenChunk& chunk);

// False only for tokens that the caller's mask calls padding.
bool is_token(const PipelineArgs& args, int64_t token_in_chunk);

}  // namespace conclave::inline v0

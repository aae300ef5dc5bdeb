// Stage one: turns the caller's routing, logits or hidden rows into checked ids and weights.
#pragma once

#include "layer/stages/chunk.h"

namespace conclave::inline v0 {

// Ids in the result lie in [0, E + Z) or are -1; padding tokens have only -1. Shared experts have
// weights for SharedMode::kRouterWeight and kFusedSlots. The router weighs ids given without
// weights. Fills the captures and adds to the expert load. `rows` are the chunk's hidden rows in
// the kernel's format. Throws Error(kExpertId) if a custom router breaks its contract under
// IdPolicy::kStrict.
Routing route_chunk(const PipelineArgs& args, const RowBundle& rows, ForwardCounters& counters);

// Float32 rows for a gate product: `rows` themselves if they are float32 already, else converted.
RowBundle float_rows(const PipelineArgs& args, const RowBundle& rows);

// The chunk's rows of a [T, n] argument.
ConstTensorView chunk_rows(const ConstTensorView& tensor, const TokenChunk& chunk);
TensorView chunk_rows(const TensorView& tensor, const TokenChunk& chunk);

// False only for tokens that the caller's mask calls padding.
bool is_token(const PipelineArgs& args, int64_t token_in_chunk);

}  // namespace conclave::inline v0

// Loads routing that the caller brings: ids, weights and token ids of a chunk, checked once more
// against the layer and converted to the router's types.
#pragma once

#include "layer/stages/chunk.h"

namespace conclave::inline v0 {

// Ids of the first k slots, [count, k]. Ids outside [0, E + Z) become -1; all but -1 itself are
// counted.
void load_given_ids(const PipelineArgs& args, int32_t* ids, ForwardCounters& counters);

// Weights of the first k slots, [count, k].
void load_given_weights(const PipelineArgs& args, float* weights);

// For SharedMode::kFusedSlots: weights of the shared experts' own slots, [count, S].
void load_fused_weights(const PipelineArgs& args, float* shared_weights);
// Sets weight 0 for each of these slots whose given id is not that of its shared expert, E + i.
void drop_unused_slots(const PipelineArgs& args, float* shared_weights, ForwardCounters& counters);

// [count] as int32; 0 for padding, whose id has no meaning.
void load_token_ids(const PipelineArgs& args, int32_t* token_ids);

}  // namespace conclave::inline v0

// The shared experts, which every token uses, and how they mix with the routed ones.
#pragma once

#include "layer/stages/chunk.h"

namespace conclave::inline v0 {

// Float32 rows [count, H], dense: the shared part of the sum with its gate, mix or slot weights
// applied, zero for padding; null without shared experts. A mode that also weighs the routed part
// leaves its factors in LayerSlices::mix. Runs after routing, which gives the weights of
// kRouterWeight and kFusedSlots.
const float* run_shared_experts(const PipelineArgs& args, const RowBundle& hidden_rows);

}  // namespace conclave::inline v0

// Plan time: decides which stages a layer has and where each finds its scratch memory.
#pragma once

#include "layer/plan.h"

namespace conclave::inline v0 {

// Rows that dispatch takes per token: k if each choice reads a row of its own, otherwise 1.
int64_t dispatched_rows_per_token(const MoeSpec& spec);

// Derives the stages from the spec and the kernels.
StagePlan plan_stages(const LayerPlan& plan);

// Books every slice for max_tokens: fills slices and the workspace's bytes. The kernels, the
// dispatcher, `stages` and the order of chunks must be chosen before. Throws Error(kSizeOverflow).
void book_workspace(LayerPlan& plan);

}  // namespace conclave::inline v0

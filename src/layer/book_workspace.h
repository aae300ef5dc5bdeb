// Plan time: which stages a layer has and where each finds its scratch memory.
#pragma once

#include "layer/plan.h"

namespace conclave::inline v0 {

// Rows that dispatch takes of a token: k where each choice reads a row of its own.
int64_t dispatched_rows_per_token(const MoeSpec& spec);

// From the spec and the kernels.
StagePlan plan_stages(const LayerPlan& plan);

// Books every slice for max_tokens: fills slices and workspace_bytes. After the kernels, the
// dispatcher and `stages` are chosen. Throws Error(kSizeOverflow).
void book_workspace(LayerPlan& plan);

}  // namespace conclave::inline v0

// The kernel that does the whole forward of few tokens in one launch, beside the ladder.
#pragma once

#include "layer/cuda/plan.h"

namespace conclave::inline v0 {

// The first row of one launch that fits; without one, all calls take the ladder. plan.routed holds
// its problem, with the slots of shared experts.
void choose_one_launch(CudaPlan& plan);

}  // namespace conclave::inline v0

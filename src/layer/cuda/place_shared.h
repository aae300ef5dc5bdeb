// Where shared experts run: as further experts of the routed ones' launches, or in their own.
#pragma once

#include "layer/cuda/plan.h"

namespace conclave::inline v0 {

// Plans the shared experts beside plan.routed, or within it, and lists both ways with the reason.
void place_shared(CudaPlan& plan, const experts::ExpertsProblem& shared);

}  // namespace conclave::inline v0

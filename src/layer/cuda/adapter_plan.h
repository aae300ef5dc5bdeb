// Which kernels compute rows that have adapters.
#pragma once

#include "layer/cuda/plan.h"

#include "conclave/error.h"

namespace conclave::inline v0 {

// Fills the adapter rungs of a part whose ladder is chosen, or says why it takes no adapters.
Support plan_adapters(CudaMlpPlan& part);

}  // namespace conclave::inline v0

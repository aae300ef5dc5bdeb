// Factors that are steps as kernels read them.
#pragma once

#include "layer/cuda/mlp_source.h"
#include "layer/cuda/upload_lanes.h"
#include "layer/cuda/weights.h"

#include "conclave/context.h"

namespace conclave::inline v0 {

// Throws Error(kTensorValue) naming the tensor of a scale or offset that is no whole number of
// steps of those beside it.
void fill_step_factors(const MlpSource& mlp, UploadLanes& lanes, CudaMlpWeights& weights,
                       const Context& context);

}  // namespace conclave::inline v0

// Factors of FactorForm::kExact as kernels read them.
#pragma once

#include "experts/cuda/device_experts.h"
#include "layer/cuda/mlp_source.h"
#include "layer/cuda/upload_lanes.h"
#include "layer/cuda/weights.h"

#include <cstdint>

namespace conclave::inline v0 {

// An expert's scales take these.
inline int64_t exact_bytes(const experts::FactorPlanes& planes) {
  return planes.groups * planes.byte_stride;
}

// Throws Error(kTensorValue) naming the tensor for a scale that no byte stands for, and for those
// of a matrix that lie further apart than kernels of the layer take.
void fill_exact_factors(const MlpSource& mlp, UploadLanes& lanes, CudaMlpWeights& weights);

// The most powers of two that the scales of a matrix lie apart, where these are powers.
int32_t scale_span(const MlpSource& mlp, const WeightSource& source);

}  // namespace conclave::inline v0

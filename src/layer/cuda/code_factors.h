// Factors of codes in FactorPlanes, as kernels read them.
#pragma once

#include "experts/cuda/device_experts.h"
#include "layer/cuda/expert_places.h"
#include "layer/cuda/mlp_source.h"
#include "layer/cuda/upload_lanes.h"
#include "layer/cuda/weights.h"

#include "conclave/context.h"

#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

// An expert's scales are so many; its zero points and offsets likewise.
inline int64_t numbers_of(const experts::FactorPlanes& planes) {
  return planes.groups * planes.parts * planes.row_stride;
}

// `places` has one entry for each expert. Throws Error(kTensorValue) naming the tensor for a scale
// that no byte stands for, where scales are bytes.
void fill_factors(const MlpSource& mlp, const std::vector<ExpertPlaces>& places, UploadLanes& lanes,
                  CudaMlpWeights& weights, const Context& context);
// Whether kernels may take the scales of every place for short ones.
bool has_only_short_scales(const CudaMatrixMemory& memory);

}  // namespace conclave::inline v0

// XXH3-64 of a rank's weights as they lie on its device, read back from there.
#pragma once

#include "layer/cuda/plan.h"
#include "layer/cuda/weight_fence.h"
#include "layer/cuda/weights.h"

#include <cstdint>
#include <span>

namespace conclave::inline v0 {

// On the current device. Waits; follows copies of a refit that are under way. `places`: the expert
// in each place, -1 for a free one.
uint64_t hash_cuda_weights(const CudaPlan& plan, const CudaWeights& weights,
                           std::span<const int32_t> places, const WeightFence& fence);

}  // namespace conclave::inline v0

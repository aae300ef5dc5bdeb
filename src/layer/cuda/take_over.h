// A layer on other ranks: what this rank has on its device is copied there, in the order of its new
// places, and what it lacks is read.
#pragma once

#include "layer/cuda/plan.h"
#include "layer/cuda/weights.h"

#include "conclave/context.h"
#include "conclave/weights.h"

#include <cstdint>
#include <span>

namespace conclave::inline v0 {

// Weights of another plan, as they lie on the device of this one. They may go once the stream of
// the copies has passed.
struct HeldCudaWeights {
  const CudaPlan& plan;
  const CudaWeights& weights;
  std::span<const int32_t> places;  // the expert in each place, as routed_source has them
};

// A routed expert of the plan that is not held, the number of experts if something else is not held
// in the plan's form, or -1.
int64_t first_missing(const CudaPlan& plan, const HeldCudaWeights& held);

// The plan's weights. `source` may be null if nothing is missing. Waits until neither is needed.
// Throws as fill_cuda_weights.
CudaWeights take_over_cuda_weights(const Context& context, DeviceAllocator& allocator,
                                   const CudaPlan& plan, const HeldCudaWeights& held,
                                   const WeightSource* source, Stream stream);

}  // namespace conclave::inline v0

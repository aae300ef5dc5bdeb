// Runs the calls of a layer on CUDA.
#pragma once

#include "layer/cuda/plan.h"
#include "layer/cuda/weights_on_device.h"
#include "layer/engine.h"

#include "conclave/context.h"

#include <memory>

namespace conclave::inline v0 {

// Kernels bound to the addresses of the weights. `like`: another runner of this device whose
// numbers of rows may be shared, or null. Context, plan and weights outlive it.
std::unique_ptr<LayerRunner> make_cuda_runner(const Context& context, const CudaPlan& plan,
                                              const WeightsOnDevice& weights,
                                              const LayerRunner* like);

}  // namespace conclave::inline v0

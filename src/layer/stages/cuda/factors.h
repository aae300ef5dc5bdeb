// Weights of the shared experts and of the routed part in the sum of a token, on CUDA.
#pragma once

#include "layer/stages/cuda/chunk.h"
#include "layer/stages/cuda/route.h"

#include "conclave/tensor.h"

#include <cstdint>

namespace conclave::inline v0 {

// Runs before the router: enqueues what the factors need. kFusedSlots reads the given routing, and
// captures it.
CudaFactors enqueue_factors(const CudaChunk& chunk, const ConstTensorView& hidden,
                            const CudaGiven& given, const CudaCaptures& captures);

// The slots of fused shared experts; count is 0 if there are none.
SharedSlots shared_slots(const CudaPlan& plan, const CudaFactors& factors);

}  // namespace conclave::inline v0

// Weights of the shared experts and of the routed part in the sum of a token, on CUDA.
#pragma once

#include "layer/stages/cuda/chunk.h"

#include <cstdint>

namespace conclave::inline v0 {

// Runs before the router: enqueues the work that fills slices.shared_factor and slices.mix. For
// SharedMode::kRouterWeight the router fills them.
void enqueue_factors(const CudaCall& call, const int64_t* live_tokens, const bool* padding_mask);

// Factors of the rows that the shared experts' own launches make: [T, S], or null: shared_constant.
const float* shared_factors(const CudaCall& call);
float shared_constant(const CudaCall& call);

// The slots of fused shared experts; count is 0 if there are none.
SharedSlots shared_slots(const CudaCall& call);

}  // namespace conclave::inline v0

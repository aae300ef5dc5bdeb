// What shared experts and the routed part weigh in the sum of a token, on CUDA.
#pragma once

#include "layer/cuda/pipeline.h"

#include <cstdint>

namespace conclave::inline v0 {

// Of the caller's routing or the gate, before it runs: enqueues what fills slices.shared_factor and
// slices.mix, but for SharedMode::kRouterWeight, where the router does.
void enqueue_factors(const CudaCall& call, const int64_t* live_tokens, const bool* padding_mask);

// Of the rows that launches of their own make: [T, S], or null: shared_constant.
const float* shared_factors(const CudaCall& call);
float shared_constant(const CudaCall& call);

// The slots of fused shared experts; none: count is 0.
SharedSlots shared_slots(const CudaCall& call);

}  // namespace conclave::inline v0

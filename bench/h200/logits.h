// Makes router logits for a problem's batch.
#pragma once

#include "cuda/memory.h"
#include "support/cuda/cuda_problem.h"

namespace conclave::bench {

// [routings, T, E] float32 whose softmax, renormalised over the k largest, gives the batch's own
// ids and weights, so that one oracle serves ids and logits.
cuda::DeviceBuffer make_logits(const testing::CudaProblem& problem);

}  // namespace conclave::bench

// Weights of the shared experts and of the routed part in the sum of a token, on CUDA.
#pragma once

#include "layer/stages/cuda/chunk.h"

#include "conclave/tensor.h"

#include <cstdint>

namespace conclave::inline v0 {

// The factors of a chunk, on the device.
struct CudaFactors {
  // Factors of the rows that shared experts make: [T, S], or null: the constant.
  const float* shared = nullptr;
  float shared_constant = 1;
  // Factors of the routed part: [T], or null: the constant.
  const float* routed = nullptr;
  float routed_constant = 1;
};

// The caller's routing of a chunk, which SharedMode::kFusedSlots reads and writes; empty where it
// gave none.
struct GivenSlots {
  ConstTensorView topk_ids;
  ConstTensorView topk_weights;
  TensorView captured_ids;
  TensorView captured_weights;
  const int64_t* live_tokens = nullptr;
  const bool* padding_mask = nullptr;
};

// Runs before the router: enqueues what the factors need. For SharedMode::kRouterWeight the router
// fills them.
CudaFactors enqueue_factors(const CudaChunk& chunk, const ConstTensorView& hidden,
                            const GivenSlots& given);

// The slots of fused shared experts; count is 0 if there are none.
SharedSlots shared_slots(const CudaPlan& plan, const CudaFactors& factors);

}  // namespace conclave::inline v0

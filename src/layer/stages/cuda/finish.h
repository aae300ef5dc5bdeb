// The end of a chunk on CUDA: the weighted sum and the terms that join it before it is rounded.
#pragma once

#include "layer/stages/cuda/factors.h"
#include "layer/stages/cuda/mlp.h"
#include "layer/stages/cuda/route.h"

#include "conclave/tensor.h"

namespace conclave::inline v0 {

// Terms that join the routed rows, which stand in the chunk's buffers as `rows` says.
struct CudaTerms {
  RoutedRows rows = RoutedRows::kAwaitSum;
  CudaFactors factors;
  ConstTensorView hidden;  // counts for zero experts
};

// `shared_out` is empty if the caller wants no shared part of its own.
void combine_and_finish(const CudaChunk& chunk, const CudaRouting& routing, const CudaTerms& terms,
                        const TensorView& out, const TensorView& shared_out);

}  // namespace conclave::inline v0

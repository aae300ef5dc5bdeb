// The end of a chunk on CUDA: the weighted sum and the terms that join it before it is rounded.
#pragma once

#include "layer/stages/cuda/chunk.h"
#include "layer/stages/cuda/mlp.h"
#include "layer/stages/cuda/route.h"

namespace conclave::inline v0 {

void combine_and_finish(const CudaCall& call, const CudaRouting& routing, RoutedRows rows);

}  // namespace conclave::inline v0

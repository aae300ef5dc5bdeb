// The end of a chunk on CUDA: the weighted sum and the terms that join it before it is rounded.
#pragma once

#include "dispatch/cuda/combine.h"
#include "layer/stages/cuda/factors.h"
#include "layer/stages/cuda/mlp.h"
#include "layer/stages/cuda/route.h"

#include "conclave/tensor.h"

namespace conclave::inline v0 {

// Terms that join the routed rows.
struct CudaTerms {
  CudaFactors factors;
  SourceRows shared = {};    // S rows per token, or none
  SourceRows residual = {};  // or none
  ConstTensorView hidden;    // counts for zero experts
};
// The caller's tensors; `shared` is empty if it wants no shared part of its own.
struct CudaOutputs {
  TensorView out;
  TensorView shared;
};

// The sum of `rows` over a token's slots, still without an output.
dispatch::DeviceCombineArgs sum_of_slots(const CudaChunk& chunk, const CudaRouting& routing,
                                         const RoutedRows& rows);
// The weighted sums of slots before they are projected up, [T, Hl] float32.
RoutedRows sum_slots(const CudaChunk& chunk, const CudaRouting& routing, const RoutedRows& rows);
// This rank's experts add these to the sums of slots, [T, padded Hl] in the type that travels: the
// rows themselves where they are such sums.
RoutedRows expert_part(const CudaChunk& chunk, const CudaRouting& routing, const RoutedRows& rows);
void norm_sums(const CudaChunk& chunk, const RoutedRows& sums);
// Projects up if the layer is latent. Returns the sum of everything, which is still to be made.
dispatch::DeviceCombineArgs last_sum(const CudaChunk& chunk, const CudaRouting& routing,
                                     const RoutedRows& rows, const CudaTerms& terms);
// Makes it, rounded once.
void finish_sum(const CudaChunk& chunk, dispatch::DeviceCombineArgs sum,
                const CudaOutputs& outputs);

}  // namespace conclave::inline v0

// Expert-parallel ranks on CUDA: the rows of all ranks meet at the experts of each, and the sums of
// a token come home, where they are added in rank order. Nothing here waits.
#pragma once

#include "layer/stages/cuda/adapters.h"
#include "layer/stages/cuda/mlp.h"
#include "layer/stages/cuda/route.h"
#include "layer/stages/cuda/rows.h"

namespace conclave::inline v0 {

// The tokens of all ranks, in rank order.
struct GatheredTokens {
  SourceRows rows;
  CudaRouting routing;  // without groups; tokens that do not count have no ids
  CudaMarks marks;
};

// Enqueues the exchange of this rank's rows, ids, weights and marks with those of all others, of
// which any may have an adapter where this rank's have none. `chunk` has
// this rank's tokens, 0 or more, and the counts of all. Ranks that have other counts, or rows of
// another type, fail with kCommMismatch, which a later call throws.
GatheredTokens gather_tokens(const CudaChunk& chunk, const CudaRouting& routing,
                             const SourceRows& rows, const CudaMarks& marks);

// `part`: what this rank's experts add to the tokens of all ranks. Returns the sums of all ranks'
// parts for this rank's tokens, with the same bits however fast each rank was.
RoutedRows bring_home(const CudaChunk& chunk, const RoutedRows& part);

}  // namespace conclave::inline v0

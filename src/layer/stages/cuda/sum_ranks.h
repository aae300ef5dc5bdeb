// The end of a chunk whose tensor-parallel ranks add up: each has computed a part of every row in
// float32; the sum is rounded once, on every rank to the same bits.
#pragma once

#include "layer/stages/cuda/finish.h"
#include "layer/stages/cuda/route.h"

#include "conclave/layer.h"

namespace conclave::inline v0 {

// Where this rank's part of the chunk's rows goes, as the output of its own stages; shared experts
// have one of their own where the call asks for them apart.
CudaOutputs rank_parts(const CudaChunk& chunk, const ForwardArgs& args);
// Enqueues the sums of the ranks' parts. All ranks have as many tokens in the chunk: where they do
// not, the communicator fails with kCommMismatch, and a later call throws it.
CudaOutputs sum_over_ranks(const CudaChunk& chunk, const CudaOutputs& parts);
void round_sums_of_ranks(const CudaChunk& chunk, const LiveRows& live, const CudaOutputs& sums,
                         const CudaOutputs& outputs);

}  // namespace conclave::inline v0

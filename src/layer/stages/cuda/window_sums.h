// Sums over ranks whose parts are made, stored to the peers, added up and rounded in one launch,
// where the communicator's windows hold them.
#pragma once

#include "dispatch/cuda/combine.h"
#include "layer/stages/cuda/finish.h"
#include "layer/stages/cuda/mlp.h"
#include "layer/stages/cuda/route.h"

#include "conclave/tensor.h"

#include <optional>

namespace conclave::inline v0 {

// `part`: what this rank's experts add to the tokens of all ranks, still to be made. Returns the
// sums of all ranks' parts for this rank's tokens, with the bits of expert_part and bring_home.
// They go to `out`, with the layer's scale, unless it is empty; `live` is of this rank's tokens.
// None where other launches do it: alike on every rank.
std::optional<RoutedRows> sum_experts_at_once(const CudaChunk& chunk,
                                              const dispatch::DeviceCombineArgs& part,
                                              const LiveRows& live, const TensorView& out);

// The same for tensor-parallel ranks, which all have the same tokens. False where other launches do
// it, or shared experts have an output of their own.
bool sum_slices_at_once(const CudaChunk& chunk, const dispatch::DeviceCombineArgs& part,
                        const LiveRows& live, const CudaOutputs& outputs);
// A part that earlier launches have made, in float32.
dispatch::DeviceCombineArgs made_part(const CudaChunk& chunk, const TensorView& rows);

}  // namespace conclave::inline v0

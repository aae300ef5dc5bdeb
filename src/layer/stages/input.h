// Makes the rows that kernels read: hidden in a kernel's format, and the routed experts' own input,
// a latent projection or rows times their routing weight.
#pragma once

#include "layer/stages/chunk.h"

namespace conclave::inline v0 {

// The chunk's hidden rows as kernels of width H read them; an empty bundle if none does.
RowBundle quantize_hidden(const PipelineArgs& args);

struct ExpertInput {
  RowBundle rows;
  // The routing for dispatch and combine. If the rows carry the weights, each choice counts here as
  // a token of one choice and weight 1.
  Routing routing;
};
// `routing` is the chunk's. With WeightOn::kInput each choice gets its own row, multiplied by its
// weight in float32 after the projection and before the one rounding to the kernel's row type.
ExpertInput make_expert_input(const PipelineArgs& args, const RowBundle& hidden_rows,
                              const Routing& routing);

// The rows that the residual MLP reads: residual_input's if given, otherwise `hidden_rows`.
RowBundle residual_rows(const PipelineArgs& args, const RowBundle& hidden_rows);

}  // namespace conclave::inline v0

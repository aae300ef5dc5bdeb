// The rows that kernels read: hidden in a kernel's format, and what routed experts read instead of
// it, a latent projection or rows times their routing weight.
#pragma once

#include "layer/pipeline.h"

namespace conclave::inline v0 {

// The chunk's hidden rows as the kernels of width H read them; an empty bundle where none does.
RowBundle quantize_hidden(const PipelineArgs& args);

struct ExpertInput {
  RowBundle rows;
  // As dispatch and combine take it: where the rows carry the weights, a token of one choice and
  // weight 1 for each of them.
  Routing routing;
};
// `routing` is the chunk's. With WeightOn::kInput each choice gets a row of its own, which is
// multiplied by its weight in float32, after the projection and before the one rounding to the
// kernel's row type.
ExpertInput make_expert_input(const PipelineArgs& args, const RowBundle& hidden_rows,
                              const Routing& routing);

// The rows the residual MLP reads: residual_input's where given, else `hidden_rows`.
RowBundle residual_rows(const PipelineArgs& args, const RowBundle& hidden_rows);

}  // namespace conclave::inline v0

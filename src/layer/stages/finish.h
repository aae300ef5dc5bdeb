// The last stage: results come home, are summed, and meet everything that is not a routed expert.
#pragma once

#include "layer/stages/chunk.h"

namespace conclave::inline v0 {

// Results of the other stages that enter the sum.
struct FinishInputs {
  ExpertOutput output;
  Routing dispatched;               // as given to dispatch
  Routing routing;                  // from the router: its weights count for zero experts
  const float* shared = nullptr;    // [count, H] to add, or null
  const float* residual = nullptr;  // likewise
};

// Sends the routed experts' results home; reads `output` and `dispatched` only.
void begin_combine(const PipelineArgs& args, const FinishInputs& inputs);
// Writes the chunk's rows of `out`. One pass if nothing stands between the sum over slots and the
// rest; otherwise combine -> routed_sum -> latent up projection -> finish.
void combine_and_finish(const PipelineArgs& args, const FinishInputs& inputs);

}  // namespace conclave::inline v0

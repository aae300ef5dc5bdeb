// Runs the few experts that every row uses: shared experts and the residual MLP.
#pragma once

#include "experts/kernel.h"
#include "layer/stages/chunk.h"

#include <cstdint>

namespace conclave::inline v0 {

struct DenseMlp {
  const experts::ExpertsKernel& kernel;
  experts::PackedExperts weights;
  int64_t num_experts = 1;
};

// out [num_experts, count, H] float32, dense: each expert applied to each of the chunk's `rows`.
void run_on_every_row(const PipelineArgs& args, const DenseMlp& mlp, const RowBundle& rows,
                      float* out);

}  // namespace conclave::inline v0

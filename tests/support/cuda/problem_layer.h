// A CudaProblem as a layer: the same weights, read where they lie.
#pragma once

#include "support/cuda/cuda_problem.h"

#include "conclave/spec.h"
#include "conclave/weights.h"

#include <memory>

namespace conclave::testing {

// Routed experts only; routing is given. Without a gate.
MoeSpec layer_spec(const CudaProblemOptions& options);

// Of rows whose strides are their lengths (multiples of 16 bytes); block scales and one a channel.
// The problem must outlive the layers made of it.
std::unique_ptr<WeightSource> layer_source(const CudaProblem& problem);

}  // namespace conclave::testing

// Presents a CudaProblem as a layer with the same weights, read in place.
#pragma once

#include "support/cuda/cuda_problem.h"

#include "conclave/spec.h"
#include "conclave/weights.h"

#include <memory>

namespace conclave::testing {

// Has routed experts only and no gate: the routing is given.
MoeSpec layer_spec(const CudaProblemOptions& options);

// Supports rows whose strides are their lengths (multiples of 16 bytes), block scales and one scale
// per channel. The problem must outlive the layers made from it.
std::unique_ptr<WeightSource> layer_source(const CudaProblem& problem);

}  // namespace conclave::testing

// "cpu.reference" for e4m3 weights: rows of activations quantised as the plan says, codes
// multiplied in float32. docs/quantisation.md has each step; every faster kernel is compared with
// this one.
#pragma once

#include "experts/experts_kernel.h"

#include <memory>

namespace conclave::inline v0::experts {

std::unique_ptr<ExpertsKernel> make_e4m3_reference_kernel(const ExpertsProblem& problem);

}  // namespace conclave::inline v0::experts

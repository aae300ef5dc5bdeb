// "cpu.reference": plain loops, float32 fused multiply-adds in ascending k. Supports every problem,
// and gives bit for bit what all other kernels with that arithmetic give.
#pragma once

#include "experts/experts_kernel.h"

#include <memory>

namespace conclave::inline v0::experts {

std::unique_ptr<ExpertsKernel> make_reference_kernel(const ExpertsProblem& problem);

}  // namespace conclave::inline v0::experts

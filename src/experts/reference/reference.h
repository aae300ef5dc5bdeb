// "cpu.reference": plain loops, float32 fused multiply-adds in ascending k. It supports every
// problem and equals all other kernels with that arithmetic bit for bit.
#pragma once

#include "experts/kernel.h"
#include "experts/problem.h"

#include <memory>

namespace conclave::inline v0::experts {

std::unique_ptr<ExpertsKernel> make_reference_kernel(const ExpertsProblem& problem);

}  // namespace conclave::inline v0::experts

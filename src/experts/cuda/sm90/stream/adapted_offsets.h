// The kernels of adapted_codes.h for codes in the order of lanes that have offsets. They multiply
// offsets by ones, where the kernel without adapters adds rows up once a stage: sums of both lie
// within the same distance of float64 and have other bits.
#pragma once

#include "experts/problem.h"

#include "conclave/error.h"

namespace conclave::inline v0::experts {

Support adapted_offsets_supports(const ExpertsProblem& problem);

}  // namespace conclave::inline v0::experts

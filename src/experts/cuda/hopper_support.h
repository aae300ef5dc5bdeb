// What every kernel for Hopper asks of a problem before anything of its own.
#pragma once

#include "experts/cuda/device_experts.h"

#include <initializer_list>

namespace conclave::inline v0::experts {

// Compute capability 9.0, and weights of one of these types.
Support supports_on_hopper(const DeviceExpertsProblem& problem,
                           std::initializer_list<DType> weights);

}  // namespace conclave::inline v0::experts

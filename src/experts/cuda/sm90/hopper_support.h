// Support checks that every kernel for Hopper makes before its own.
#pragma once

#include "experts/cuda/device_experts.h"

#include <initializer_list>

namespace conclave::inline v0::experts {

// Needs compute capability 9.0, for which this folder is compiled, and 227 KiB of shared memory.
Support is_hopper(const cuda::DeviceInfo& device);
// The same, and weights of one of these types.
Support supports_on_hopper(const ExpertsProblem& problem, std::initializer_list<DType> weights);

}  // namespace conclave::inline v0::experts

// Support checks that every kernel for Hopper makes before its own.
#pragma once

#include "experts/cuda/device_experts.h"

#include <initializer_list>

namespace conclave::inline v0::experts {

// Needs compute capability 9.0, for which this folder is compiled, and 227 KiB of shared memory.
Support is_hopper(const cuda::DeviceInfo& device);
// For kernels that read codes of rows and the scales of weights as they are stored: rows that
// become the usual codes, no zeros, orders or factors of columns, slices that begin with a block.
Support supports_codes_as_stored(const ExpertsProblem& problem);
// The same as is_hopper, and weights of one of these types.
Support supports_on_hopper(const ExpertsProblem& problem, std::initializer_list<DType> weights);
// For kernels that multiply codes of a byte by rows of the same codes: the same for this type, with
// one scale for each weight row and one for each token row, or for all, or in blocks of 128.
Support supports_bytes(const ExpertsProblem& problem, DType codes);

}  // namespace conclave::inline v0::experts

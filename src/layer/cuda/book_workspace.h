// Where a forward on CUDA finds its scratch memory.
#pragma once

#include "layer/cuda/plan.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0 {

// The cut of a grouping without experts.
inline constexpr int32_t kLeastGroupTile = 64;

struct WorkspaceBooking {
  CudaSlices slices;
  size_t total_bytes = 0;
};

// For calls of up to `tokens` tokens. Throws Error(kSizeOverflow).
WorkspaceBooking book_workspace(const CudaPlan& plan, int64_t tokens, const KernelBytes& kernels);

// Without kernels, which exist only beside weights: the intermediate rows that every kernel has.
KernelBytes estimated_kernel_bytes(const CudaPlan& plan, int64_t tokens);

}  // namespace conclave::inline v0

// Where a forward on CUDA finds its scratch memory.
#pragma once

#include "layer/cuda/plan.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace conclave::inline v0 {

// The cut of a grouping without experts.
inline constexpr int32_t kLeastGroupTile = 64;

// Of calls that one rung of the routed experts serves, since what a call of another needs is never
// beside it.
struct WorkspaceBooking {
  CallRange calls;
  CudaSlices slices;
  size_t total_bytes = 0;
};

// What the kernels need for calls of up to so many tokens.
using KernelBytesOf = std::function<KernelBytes(int64_t tokens)>;

// Calls that no single rung serves get what each of their rungs needs, all at once. Throws
// Error(kSizeOverflow).
WorkspaceBooking book_workspace(const CudaPlan& plan, const CallRange& calls,
                                const KernelBytes& kernels);
// A booking for each rung, up to calls of `max_tokens` tokens.
std::vector<WorkspaceBooking> book_every_rung(const CudaPlan& plan, int64_t max_tokens,
                                              const KernelBytesOf& bytes_of);
// Enough for calls of up to `max_tokens` tokens.
size_t workspace_bytes(const CudaPlan& plan, int64_t max_tokens, const KernelBytesOf& bytes_of);

// Without kernels, which exist only beside weights: the intermediate rows that every kernel has.
KernelBytes estimated_kernel_bytes(const CudaPlan& plan, int64_t tokens);

}  // namespace conclave::inline v0

// Books the scratch memory of a forward on CUDA.
#pragma once

#include "layer/cuda/plan.h"
#include "layer/stages/cuda/cuda_stages.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

// Tokens per tile of a grouping without experts.
inline constexpr int32_t kLeastGroupTile = 64;

// The buffers for calls that one rung of the routed experts serves. Calls of another rung never run
// beside them, so rungs may share memory.
struct WorkspaceBooking {
  CallRange calls;  // where rows gather, the tokens of all ranks together
  CudaSlices slices;
  size_t total_bytes = 0;
};

// Books for `calls`; if several rungs serve them, the slices hold what each rung needs, all at
// once. Throws Error(kSizeOverflow).
WorkspaceBooking book_workspace(const CudaPlan& plan, const CallRange& calls);
// Serves gathered rows, in chunks of up to so many tokens of this rank and so many of all. Kernels
// of fewer tokens run beside those of all, as this rank's own are counted, and in later chunks.
WorkspaceBooking book_gathered(const CudaPlan& plan, int64_t own, int64_t all);
// One booking per rung, up to calls of `max_tokens` tokens. Where rows gather there is one for all,
// since the number of a rank's own tokens does not tell the rung.
std::vector<WorkspaceBooking> book_every_rung(const CudaPlan& plan, int64_t max_tokens);
// Bytes that serve all calls of up to `max_tokens` tokens, however many other ranks bring.
size_t workspace_bytes(const CudaPlan& plan, int64_t max_tokens);

}  // namespace conclave::inline v0

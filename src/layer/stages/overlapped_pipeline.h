// Chunks of a call by twos: each exchange of one chunk is under way while the other computes.
#pragma once

#include "layer/kernel_counts.h"
#include "layer/stages/chunk.h"

namespace conclave::inline v0 {

// The second way through the stages of a call, beside that in turn (chunk.cc). Needs twice the
// workspace of a chunk.
void run_overlapped(const HostCall& call, KernelCounts& counts);

}  // namespace conclave::inline v0

// A command-line program for rows of the device catalog: checks results first, then compares the
// time with the floor.
#pragma once

#include "experts/catalog.h"
#include "experts/cuda/device_experts.h"

#include <span>

namespace conclave::testing {

// Options: --case NAME,... (names in cases.h; "tiny") --T 1,16,64 --row NAME,... (all)
//   --tile all | N,... (indices into the row's tiles; 0) --routing uniform|zipf|onehot|holes
//   --replays N (5) --check 0|1 (1) --time 0|1 (1) --activation NAME --custom E,k,H,I,dtype
// dtype: bf16, f16, fp8block, fp8channel, fp8static. Prints one line per case, T, row and tile.
// Returns the exit status: 1 if a check failed.
int run_experts_bench(std::span<const experts::DeviceKernelRow> rows, int argc, char** argv);

}  // namespace conclave::testing

// Finds kernels of codes of 4 bits whose scales, and offsets, are steps of 16 columns.
#pragma once

#include "experts/cuda/sm90/tile_codes/kernels.h"

namespace conclave::inline v0::experts::tile_codes {

KernelPair find_kernels_times_steps(const DeviceTile& tile);
KernelPair find_shifted_kernels_times_steps(const DeviceTile& tile);

}  // namespace conclave::inline v0::experts::tile_codes

// Finds kernels of codes of 2 bits.
#pragma once

#include "experts/cuda/sm90/tile_codes/kernels.h"

namespace conclave::inline v0::experts::tile_codes {

KernelPair find_kernels_of_small_codes(const DeviceTile& tile);

}  // namespace conclave::inline v0::experts::tile_codes

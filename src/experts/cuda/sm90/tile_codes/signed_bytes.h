// Finds kernels of codes of int8, which take no table.
#pragma once

#include "experts/cuda/sm90/tile_codes/kernels.h"

namespace conclave::inline v0::experts::tile_codes {

// With or without zero points, and of rows that have one scale each.
KernelPair find_kernels_of_signed_bytes(const DeviceTile& tile);
KernelPair find_kernels_of_rows_of_signed_bytes(const DeviceTile& tile);

}  // namespace conclave::inline v0::experts::tile_codes

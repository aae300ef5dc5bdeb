// Finds kernels of codes of 2 bits, for rows without and with adapters.
#pragma once

#include "experts/cuda/sm90/stream/adapted_codes.cuh"
#include "experts/cuda/sm90/stream/codes_tiles.cuh"

namespace conclave::inline v0::experts::stream {

CodesKernelPair find_kernels_of_small_codes(const DeviceTile& tile);
AdaptedCodesPair find_adapted_of_small_codes(const DeviceTile& tile);

}  // namespace conclave::inline v0::experts::stream

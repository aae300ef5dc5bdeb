#include "experts/cuda/sm90/stream/rounded_small.cuh"
#include "experts/cuda/sm90/tile_codes/kernels.cuh"
#include "experts/cuda/sm90/tile_codes/small_codes.h"

namespace conclave::inline v0::experts::tile_codes {

KernelPair find_kernels_of_small_codes(const DeviceTile& tile) {
  return find_tile<stream::Codes{.bits = 2,
                                 .steps_of_sum = 1,
                                 .offsets = true,
                                 .in_order = true,
                                 .rounded = true,
                                 .steps = true}>(tile);
}

}  // namespace conclave::inline v0::experts::tile_codes

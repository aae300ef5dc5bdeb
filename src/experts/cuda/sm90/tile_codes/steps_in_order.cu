#include "experts/cuda/sm90/tile_codes/kernels.cuh"

namespace conclave::inline v0::experts::tile_codes {

KernelPair find_kernels_in_order_with_steps(const DeviceTile& tile) {
  return find_tile<stream::Codes{.bits = 4,
                                 .steps_of_sum = 2,
                                 .offsets = true,
                                 .in_order = true,
                                 .rounded = true,
                                 .steps = true}>(tile);
}

}  // namespace conclave::inline v0::experts::tile_codes

#include "experts/cuda/sm90/stream/rounded_signed_bytes.cuh"
#include "experts/cuda/sm90/tile_codes/byte_steps.h"
#include "experts/cuda/sm90/tile_codes/kernels.cuh"

namespace conclave::inline v0::experts::tile_codes {

KernelPair find_shifted_kernels_of_8_bits_with_steps(const DeviceTile& tile) {
  return find_tile<stream::Codes{.bits = 8,
                                 .steps_of_sum = 2,
                                 .offsets = true,
                                 .in_order = true,
                                 .rounded = true,
                                 .steps = true}>(tile);
}

}  // namespace conclave::inline v0::experts::tile_codes

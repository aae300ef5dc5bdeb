#include "experts/cuda/sm90/stream/rounded_steps.cuh"
#include "experts/cuda/sm90/tile_codes/kernels.cuh"
#include "experts/cuda/sm90/tile_codes/times_steps.h"

namespace conclave::inline v0::experts::tile_codes {

using stream::Codes;

KernelPair find_kernels_times_steps(const DeviceTile& tile) {
  return find_tile<Codes{
      .bits = 4, .steps_of_sum = 1, .in_order = true, .rounded = true, .steps = true}>(tile);
}

KernelPair find_shifted_kernels_times_steps(const DeviceTile& tile) {
  return find_tile<Codes{.bits = 4,
                         .steps_of_sum = 1,
                         .offsets = true,
                         .in_order = true,
                         .rounded = true,
                         .steps = true}>(tile);
}

}  // namespace conclave::inline v0::experts::tile_codes

#include "experts/cuda/sm90/tile_codes/kernels.cuh"

namespace conclave::inline v0::experts::tile_codes {

using stream::ExactScales;

KernelPair find_kernels_of_powers(const DeviceTile& tile) {
  return find_tile<stream::Codes{
      .bits = 4, .steps_of_sum = 2, .rounded = true, .exact = ExactScales::kPowers}>(tile);
}

}  // namespace conclave::inline v0::experts::tile_codes

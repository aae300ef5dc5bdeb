#include "experts/cuda/sm90/stream/codes_tiles.cuh"

namespace conclave::inline v0::experts::stream {

CodesKernelPair find_kernels_of_long_sums(const DeviceTile& tile) {
  return find_of_lanes<Codes{.bits = 4, .steps_of_sum = 8, .in_order = true}>(tile);
}

}  // namespace conclave::inline v0::experts::stream

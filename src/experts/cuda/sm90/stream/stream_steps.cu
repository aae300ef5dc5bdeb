#include "experts/cuda/sm90/stream/codes_tiles.cuh"

namespace conclave::inline v0::experts::stream {

CodesKernelPair find_kernels_of_steps(const DeviceTile& tile) {
  return find_in_all<Codes{.bits = 8, .steps_of_sum = 1, .steps = true}>(tile);
}

}  // namespace conclave::inline v0::experts::stream

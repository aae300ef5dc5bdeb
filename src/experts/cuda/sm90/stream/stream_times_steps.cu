#include "experts/cuda/sm90/stream/step_tiles.cuh"

namespace conclave::inline v0::experts::stream {

CodesKernelPair find_kernels_times_steps(const DeviceTile& tile) {
  return find_times_steps<false>(tile);
}

}  // namespace conclave::inline v0::experts::stream

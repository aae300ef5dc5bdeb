#include "experts/cuda/sm90/stream/step_tiles.cuh"

namespace conclave::inline v0::experts::stream {

CodesKernelPair find_shifted_kernels_times_steps(const DeviceTile& tile) {
  return find_times_steps<true>(tile);
}

}  // namespace conclave::inline v0::experts::stream

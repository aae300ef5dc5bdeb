#include "experts/cuda/sm90/stream/offset_tiles.cuh"

namespace conclave::inline v0::experts::stream {

CodesKernelPair find_kernels_of_bytes_with_steps(const DeviceTile& tile) {
  return find_with_offsets<codes_with_offsets(8, true)>(tile);
}

}  // namespace conclave::inline v0::experts::stream

#include "experts/cuda/sm90/stream/offset_tiles.cuh"

namespace conclave::inline v0::experts::stream {

CodesKernelPair find_kernels_in_order_with_offsets(const DeviceTile& tile) {
  return find_with_offsets<codes_with_offsets(4, false)>(tile);
}

}  // namespace conclave::inline v0::experts::stream

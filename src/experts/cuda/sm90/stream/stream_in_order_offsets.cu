#include "experts/cuda/sm90/stream/codes_tiles.cuh"

namespace conclave::inline v0::experts::stream {

CodesKernelPair find_kernels_in_order_with_offsets(const DeviceTile& tile) {
  return find_in_all<Codes{.bits = 4, .steps_of_sum = 2, .offsets = true, .in_order = true}>(tile);
}

}  // namespace conclave::inline v0::experts::stream

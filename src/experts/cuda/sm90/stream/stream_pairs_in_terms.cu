#include "experts/cuda/sm90/stream/codes_tiles.cuh"

namespace conclave::inline v0::experts::stream {

CodesKernelPair find_kernels_of_pairs_in_terms(const DeviceTile& tile) {
  return find_in_all<Codes{.bits = 4, .steps_of_sum = 4, .terms = 2, .in_pairs = true}>(tile);
}

}  // namespace conclave::inline v0::experts::stream

#include "experts/cuda/sm90/stream/small_codes.h"
#include "experts/cuda/sm90/stream/small_tiles.cuh"

namespace conclave::inline v0::experts::stream {

// The kernels of kSmallCodesTiles of stream_codes.cc.
CodesKernelPair find_kernels_of_small_codes(const DeviceTile& tile) {
  switch (tile.tokens) {
    case 16:
      return pair_with_offsets<16, kSmallCodes, 256>();
    case 32:
      return pair_with_offsets<32, kSmallCodes, 256>();
    case 64:
      return pair_with_offsets<64, kSmallCodes>();
    default:
      refuse_tile(tile);
  }
}

}  // namespace conclave::inline v0::experts::stream

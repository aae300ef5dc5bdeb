#include "experts/cuda/sm90/stream/adapted_offsets.cuh"
#include "experts/cuda/sm90/stream/small_codes.h"
#include "experts/cuda/sm90/stream/small_tiles.cuh"

namespace conclave::inline v0::experts::stream {

// The kernels of kSmallCodesTiles of adapted_codes.cc.
AdaptedCodesPair find_adapted_of_small_codes(const DeviceTile& tile) {
  if (tile.tokens == 16) return adapted_pair_with_offsets<16, kSmallCodes, 256>();
  if (tile.tokens == 64) return adapted_pair_with_offsets<64, kSmallCodes>();
  refuse_adapted_tile(tile);
}

}  // namespace conclave::inline v0::experts::stream

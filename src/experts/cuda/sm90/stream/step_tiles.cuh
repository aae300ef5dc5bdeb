// The tiles of kernels of codes of 4 bits whose scales are steps of 16 columns.
#pragma once

#include "experts/cuda/sm90/stream/offset_tiles.cuh"
#include "experts/cuda/sm90/stream/step_products.cuh"

namespace conclave::inline v0::experts::stream {

constexpr Codes codes_times_steps(bool offsets) {
  return {.bits = 4, .steps_of_sum = 1, .offsets = offsets, .in_order = true, .steps = true};
}

// The kernels of kTilesOfSteps of stream_codes.cc.
template <bool kOffsets, int kTokens, int kWeightRows = 128>
CodesKernelPair pair_times_steps() {
  if constexpr (kOffsets) {
    return pair_with_offsets<kTokens, codes_times_steps(true), kWeightRows>();
  } else {
    return pair_of_tile<kTokens, codes_times_steps(false), kWeightRows>();
  }
}
template <bool kOffsets>
CodesKernelPair find_times_steps(const DeviceTile& tile) {
  const bool wide = tile.features == 256;
  switch (tile.tokens) {
    case 16:
      return wide ? pair_times_steps<kOffsets, 16, 256>() : pair_times_steps<kOffsets, 16>();
    case 32:
      return pair_times_steps<kOffsets, 32, 256>();
    case 64:
      return pair_times_steps<kOffsets, 64>();
    default:
      refuse_tile(tile);
  }
}

}  // namespace conclave::inline v0::experts::stream

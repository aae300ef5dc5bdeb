#include "experts/cuda/sm90/stream/codes_tiles.cuh"
#include "experts/cuda/sm90/stream/signed_byte_kernels.h"
#include "experts/cuda/sm90/stream/signed_bytes.cuh"
#include "experts/cuda/sm90/stream/signed_bytes.h"

namespace conclave::inline v0::experts::stream {
namespace {

template <int kTokens, int kWeightRows = 128>
CodesKernelPair pair_of_signed_bytes() {
  constexpr Shape kShape{.max_tokens = kTokens,
                         .weight_rows = kWeightRows,
                         .atoms = 2,
                         .stages = signed_byte_stages(kTokens, kWeightRows),
                         .consumers = kWeightRows / 64};
  return codes_kernels<kShape, Codes{.bits = 8, .steps_of_sum = 2, .in_order = true}>();
}

}  // namespace

CodesKernelPair find_kernels_of_signed_bytes(const DeviceTile& tile) {
  const bool wide = tile.features == 256;
  switch (tile.tokens) {
    case 16:
      return wide ? pair_of_signed_bytes<16, 256>() : pair_of_signed_bytes<16>();
    case 32:
      return wide ? pair_of_signed_bytes<32, 256>() : pair_of_signed_bytes<32>();
    case 64:
      return pair_of_signed_bytes<64>();
    case 96:
      return pair_of_signed_bytes<96>();
    default:
      refuse_tile(tile);
  }
}

}  // namespace conclave::inline v0::experts::stream

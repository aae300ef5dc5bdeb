// The kernels of cuda.tile_codes_sm90: those of the streamed products with other tiles, whose
// consumers round weights to bf16.
#pragma once

#include "experts/cuda/sm90/stream/codes_product.cuh"
#include "experts/cuda/sm90/tile_codes/kernels.h"

#include "conclave/error.h"

namespace conclave::inline v0::experts::tile_codes {

template <int kTokens, stream::Codes kCodes>
KernelPair kernels_of_tile() {
  constexpr TileCodesForm kForm{.bits = kCodes.bits,
                                .shifts = kCodes.offsets || kCodes.zeros,
                                .whole_rows = kCodes.whole_rows,
                                .pairs_in_terms = kCodes.in_pairs && kCodes.terms == 2};
  constexpr stream::Shape kShape{.max_tokens = kTokens,
                                 .weight_rows = kTokens == 144 ? 192 : 128,
                                 .atoms = kCodes.bits == 8 ? 2 : 4,
                                 .stages = 2,
                                 .sorted = true,
                                 .consumers = kTokens == 96    ? 4
                                              : kTokens == 144 ? 3
                                                               : 2,
                                 .token_stages = tile_codes_token_stages(kForm, kTokens)};
  return stream::codes_kernels<kShape, kCodes>();
}

template <stream::Codes kCodes>
KernelPair find_tile(const DeviceTile& tile) {
  if (tile.tokens == 144) return kernels_of_tile<144, kCodes>();
  if (tile.tokens == 256) return kernels_of_tile<256, kCodes>();
  throw Error(ErrorCode::kUnsupported,
              {.what = "cuda.tile_codes_sm90 has no such tile", .found = to_string(tile)});
}

}  // namespace conclave::inline v0::experts::tile_codes

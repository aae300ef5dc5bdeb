// The kernels of the tiles that cuda.stream_codes_sm90 has.
#pragma once

#include "experts/cuda/sm90/stream/codes_product.cuh"
#include "experts/cuda/sm90/stream/stream_codes.h"

#include "conclave/error.h"

namespace conclave::inline v0::experts::stream {

using CodesKernelPair = KernelPairOf<CodedParams>;

[[noreturn]] inline void refuse_tile(const DeviceTile& tile) {
  throw Error(ErrorCode::kUnsupported,
              {.what = "cuda.stream_codes_sm90 has no such tile", .found = to_string(tile)});
}

template <int kTokens, Codes kCodes, int kWeightRows = 128>
CodesKernelPair pair_of_tile() {
  constexpr CodeKernelForm kForm{.bits = kCodes.bits,
                                 .columns_of_sum = 16 * kCodes.steps_of_sum,
                                 .offsets = kCodes.offsets,
                                 .two_terms = kCodes.terms == 2,
                                 .in_order = kCodes.in_order,
                                 .in_pairs = kCodes.in_pairs,
                                 .exact = kCodes.exact != ExactScales::kNone,
                                 .steps = kCodes.steps};
  constexpr Shape kShape{.max_tokens = kTokens,
                         .weight_rows = kWeightRows,
                         .atoms = kCodes.bits == 8 ? 2 : 4,
                         .stages = code_stages(kForm, kTokens, kWeightRows),
                         .consumers = kWeightRows / 64};
  return codes_kernels<kShape, kCodes>();
}

// The kernels of the tiles of stream_codes.cc, in the forms that have all of them.
template <Codes kCodes>
CodesKernelPair find_in_all(const DeviceTile& tile) {
  const bool wide = tile.features == 256;
  switch (tile.tokens) {
    case 16:
      return wide ? pair_of_tile<16, kCodes, 256>() : pair_of_tile<16, kCodes>();
    case 32:
      return wide ? pair_of_tile<32, kCodes, 256>() : pair_of_tile<32, kCodes>();
    case 64:
      return pair_of_tile<64, kCodes>();
    case 96:
      return pair_of_tile<96, kCodes>();
    default:
      refuse_tile(tile);
  }
}

// Codes of lanes take few registers beside sums, and have one tile more.
template <Codes kCodes>
CodesKernelPair find_of_lanes(const DeviceTile& tile) {
  if (tile.features == 256 && tile.tokens == 64) return pair_of_tile<64, kCodes, 256>();
  return find_in_all<kCodes>(tile);
}

// Those of codes that stand for whole numbers in their order, with factors of 32 columns or more
// and of 128 or more, with offsets, and with both in steps.
CodesKernelPair find_kernels_in_order(const DeviceTile& tile);
CodesKernelPair find_kernels_of_long_sums(const DeviceTile& tile);
CodesKernelPair find_kernels_in_order_with_offsets(const DeviceTile& tile);
CodesKernelPair find_kernels_in_order_with_steps(const DeviceTile& tile);
// Those of codes of 4 bits with scales of 16 columns in steps, and with offsets likewise.
CodesKernelPair find_kernels_times_steps(const DeviceTile& tile);
CodesKernelPair find_shifted_kernels_times_steps(const DeviceTile& tile);
// Those of codes of 8 bits with scales of 16 columns in steps.
CodesKernelPair find_kernels_of_steps(const DeviceTile& tile);
// Those of codes in pairs, with scales of 32 columns or more and of 64 or more.
CodesKernelPair find_kernels_of_pairs(const DeviceTile& tile);
CodesKernelPair find_kernels_of_wide_pairs(const DeviceTile& tile);
// Those whose values take two terms, with scales of 64 columns or more.
CodesKernelPair find_kernels_of_pairs_in_terms(const DeviceTile& tile);
// Those of weights that bf16 holds, with scales that are powers of two, and of e4m3.
CodesKernelPair find_kernels_of_powers(const DeviceTile& tile);
CodesKernelPair find_kernels_of_floats(const DeviceTile& tile);

}  // namespace conclave::inline v0::experts::stream

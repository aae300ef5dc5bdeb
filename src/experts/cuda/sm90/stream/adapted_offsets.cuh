// Kernels of codes with offsets whose rows may have adapters. Rows are added up as in
// offset_tiles.cuh: one without an adapter keeps its bits.
#pragma once

#include "experts/cuda/sm90/stream/adapted_codes.cuh"
#include "experts/cuda/sm90/stream/offset_tiles.cuh"

namespace conclave::inline v0::experts::stream {

template <class Config, Product kProduct>
__global__ void __launch_bounds__(Config::kThreads, 1)
    adapted_offsets_product(const __grid_constant__ AdaptedCodedParams params) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  run_summed_block<Config, kProduct, AdaptedConsumer<Config>>(
      params, *reinterpret_cast<SummedStorage<Config>*>(bytes));
}

template <int kTokens, Codes kCodes, int kWeightRows = 128>
AdaptedCodesPair adapted_pair_with_offsets() {
  using Own = SummedConfig<kTokens, kCodes, kWeightRows>;
  return {.up = describe_summed<Own>(adapted_offsets_product<Own, Product::kUp>),
          .down = describe_summed<Own>(adapted_offsets_product<Own, Product::kDown>)};
}

template <Codes kCodes>
AdaptedCodesPair find_adapted_with_offsets(const DeviceTile& tile) {
  if constexpr (has_lanes(adapted_form(kCodes))) {
    if (tile.features == 256) {
      return tile.tokens == 16 ? adapted_pair_with_offsets<16, kCodes, 256>()
                               : adapted_pair_with_offsets<32, kCodes, 256>();
    }
  }
  if (tile.tokens == 16) return adapted_pair_with_offsets<16, kCodes>();
  if (tile.tokens == 64) return adapted_pair_with_offsets<64, kCodes>();
  refuse_adapted_tile(tile);
}

}  // namespace conclave::inline v0::experts::stream

// Kernels of products whose weights are codes and whose rows may have adapters.
#pragma once

#include "experts/cuda/sm90/stream/adapted_block.cuh"
#include "experts/cuda/sm90/stream/adapted_codes.h"
#include "experts/cuda/sm90/stream/adapted_consumer.cuh"
#include "experts/cuda/sm90/stream/launch.h"
#include "experts/cuda/sm90/stream/stream_codes.h"

#include "conclave/error.h"

namespace conclave::inline v0::experts::stream {

using AdaptedCodesPair = KernelPairOf<AdaptedCodedParams>;

template <class Config, Product kProduct>
__global__ void __launch_bounds__(Config::kThreads, 1)
    adapted_codes_product(const __grid_constant__ AdaptedCodedParams params) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(bytes);
  if constexpr (takes_table(Config::kCodes)) fill_values(params, shared);
  run_adapted_block<Config, kProduct, AdaptedConsumer<Config>>(params, shared);
}

// The shape that codes have in one of the tiles of adapted_codes.cc.
constexpr CodeKernelForm adapted_form(const Codes& codes) {
  return {.bits = codes.bits,
          .columns_of_sum = 16 * codes.steps_of_sum,
          .offsets = codes.offsets,
          .two_terms = codes.terms == 2,
          .in_order = codes.in_order,
          .in_pairs = codes.in_pairs,
          .exact = codes.exact != ExactScales::kNone,
          .steps = codes.steps};
}
template <int kTokens, Codes kCodes, int kWeightRows>
constexpr Shape adapted_shape() {
  constexpr CodeKernelForm kForm = adapted_form(kCodes);
  return {.max_tokens = kTokens,
          .weight_rows = kWeightRows,
          .atoms = kCodes.bits == 8 ? 2 : 4,
          .stages = code_stages(kForm, kTokens, kWeightRows),
          .consumers = kWeightRows / 64};
}
template <int kTokens, Codes kCodes, int kWeightRows>
using AdaptedConfig = Config<__nv_bfloat16, adapted_shape<kTokens, kCodes, kWeightRows>(), kCodes>;

template <int kTokens, Codes kCodes, int kWeightRows = 128>
AdaptedCodesPair adapted_pair() {
  using Own = AdaptedConfig<kTokens, kCodes, kWeightRows>;
  return {.up = describe_kernel<Own>(adapted_codes_product<Own, Product::kUp>),
          .down = describe_kernel<Own>(adapted_codes_product<Own, Product::kDown>)};
}

[[noreturn]] inline void refuse_adapted_tile(const DeviceTile& tile) {
  throw Error(ErrorCode::kUnsupported,
              {.what = "cuda.stream_codes_sm90 has no such tile for rows with adapters",
               .found = to_string(tile)});
}

// The kernels of the tiles of adapted_codes.cc.
template <Codes kCodes>
AdaptedCodesPair find_adapted(const DeviceTile& tile) {
  if constexpr (has_lanes(adapted_form(kCodes))) {
    if (tile.features == 256 && tile.tokens == 16) return adapted_pair<16, kCodes, 256>();
    if (tile.features == 256 && tile.tokens == 32) return adapted_pair<32, kCodes, 256>();
  }
  if (tile.tokens == 16) return adapted_pair<16, kCodes>();
  if constexpr (has_tiles_of_many_tokens(adapted_form(kCodes))) {
    if (tile.tokens == 64) return adapted_pair<64, kCodes>();
  }
  refuse_adapted_tile(tile);
}

// These find what those of codes_tiles.cuh do.
AdaptedCodesPair find_adapted_in_order(const DeviceTile& tile);
AdaptedCodesPair find_adapted_of_long_sums(const DeviceTile& tile);
AdaptedCodesPair find_adapted_in_order_with_offsets(const DeviceTile& tile);
AdaptedCodesPair find_adapted_in_order_with_steps(const DeviceTile& tile);
AdaptedCodesPair find_adapted_of_steps(const DeviceTile& tile);
AdaptedCodesPair find_adapted_of_pairs(const DeviceTile& tile);
AdaptedCodesPair find_adapted_of_wide_pairs(const DeviceTile& tile);
AdaptedCodesPair find_adapted_of_pairs_in_terms(const DeviceTile& tile);
AdaptedCodesPair find_adapted_of_powers(const DeviceTile& tile);
AdaptedCodesPair find_adapted_of_floats(const DeviceTile& tile);

}  // namespace conclave::inline v0::experts::stream

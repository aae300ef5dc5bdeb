#include "experts/cuda/sm90/stream/adapted_codes.cuh"
#include "experts/cuda/sm90/stream/offset_tiles.cuh"

namespace conclave::inline v0::experts::stream {
namespace {

template <class Config, Product kProduct>
__global__ void __launch_bounds__(Config::kThreads, 1)
    adapted_offsets_product(const __grid_constant__ AdaptedCodedParams params) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  run_summed_block<Config, kProduct, AdaptedConsumer<Config>>(
      params, *reinterpret_cast<SummedStorage<Config>*>(bytes));
}

template <int kTokens, bool kSteps>
AdaptedCodesPair pair() {
  using Own = AdaptedConfig<
      kTokens,
      Codes{.bits = 4, .steps_of_sum = 2, .offsets = true, .in_order = true, .steps = kSteps}>;
  return {.up = describe_summed<Own>(adapted_offsets_product<Own, Product::kUp>),
          .down = describe_summed<Own>(adapted_offsets_product<Own, Product::kDown>)};
}

template <bool kSteps>
AdaptedCodesPair find(const DeviceTile& tile) {
  if (tile.tokens == 16) return pair<16, kSteps>();
  if (tile.tokens == 64) return pair<64, kSteps>();
  refuse_adapted_tile(tile);
}

}  // namespace

// Rows are added up as in stream_in_order_offsets.cu: one without an adapter keeps its bits.
AdaptedCodesPair find_adapted_in_order_with_offsets(const DeviceTile& tile) {
  return find<false>(tile);
}

AdaptedCodesPair find_adapted_in_order_with_steps(const DeviceTile& tile) {
  return find<true>(tile);
}

}  // namespace conclave::inline v0::experts::stream

// Products of bytes whose rows may have adapters. The up product stores float32: terms of the down
// product are of activated rows before these are quantised, which a launch of its own does.
#pragma once

#include "experts/cuda/sm90/stream/adapted_block.cuh"
#include "experts/cuda/sm90/stream/adapted_consumer.cuh"
#include "experts/cuda/sm90/stream/byte_consumer.cuh"

namespace conclave::inline v0::experts::stream {

template <class Config>
struct AdaptedByteConsumer : ByteConsumer<Config> {
  using Base = ByteConsumer<Config>;
  using Base::Base;
  using Base::kPaired;
  using Base::kSlices;
  using Base::lane;
  using Base::params;

  __device__ __forceinline__ const AdaptedParams& own() const {
    return static_cast<const AdaptedParams&>(params);
  }
  __device__ __forceinline__ adapters::WarpRows gated_rows(int32_t feature) const {
    return {.first = feature, .second = feature, .half = 1, .features = params.features};
  }
  __device__ __forceinline__ adapters::WarpRows plain_rows(int32_t feature_tile, int slice) const {
    const int32_t feature = Base::first_feature(feature_tile, slice, 16) + lane / 4;
    return {.first = feature, .second = feature + 8, .half = 0, .features = params.features};
  }

  // Scales and bias join sums in one rounding, so that terms, which rows are weighed in already,
  // are added behind them.
  template <int N>
  __device__ __forceinline__ void run_gated(const TokenTile& tile, int32_t feature_tile) {
    typename Base::RowPair rows[kSlices];
    int32_t features[kSlices];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      features[slice] =
          feature_tile * kScaleGroup + Base::own_feature() + slice * Base::kFeatureStep;
      const int64_t gate = int64_t{tile.expert} * 2 * params.features + features[slice];
      Base::describe_row(rows[slice], 0, gate, features[slice]);
      Base::describe_row(rows[slice], 1, gate + params.features, features[slice]);
    }
    adapters::EarlyStep early[kSlices];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      early[slice] = early_step(own(), tile, lane, gated_rows(features[slice]));
    }
    const auto of_tokens = Base::template find_factors<N, Product::kUp>(tile);
    float d[kSlices][N / 2];
    Base::template multiply<N, Product::kUp>(d);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      Base::template scale_and_bias<N, Product::kUp>(d[slice], tile, rows[slice], of_tokens);
      add_terms<N, true>(d[slice], own(), tile, lane, early[slice], gated_rows(features[slice]));
      Base::template activate<N>(d[slice]);
    }
    Base::template store_values<N>(d, tile, feature_tile);
  }

  template <int N, Product kProduct>
  __device__ __forceinline__ void run_plain(const TokenTile& tile, int32_t feature_tile) {
    typename Base::RowPair rows[kSlices];
#pragma unroll
    for (int i = 0; i < 2 * kSlices; ++i) {
      const int32_t feature = Base::first_feature(feature_tile, i / 2, 16) + lane / 4 + i % 2 * 8;
      Base::describe_row(rows[i / 2], i % 2, int64_t{tile.expert} * params.features + feature,
                         feature);
    }
    int32_t slots[(N + 31) / 32];
    Base::template find_slots<N, kProduct>(tile, slots);
    adapters::EarlyStep early[kSlices];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      early[slice] = early_step(own(), tile, lane, plain_rows(feature_tile, slice));
    }
    const auto of_tokens = Base::template find_factors<N, kProduct>(tile);
    float d[kSlices][N / 2];
    Base::template multiply<N, kProduct>(d);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int32_t first = Base::first_feature(feature_tile, slice, 16);
      Base::template scale_and_bias<N, kProduct>(d[slice], tile, rows[slice], of_tokens);
      add_terms<N, true>(d[slice], own(), tile, lane, early[slice],
                         plain_rows(feature_tile, slice));
      if constexpr (kProduct == Product::kUp) {
        Base::template activate<N>(d[slice]);
      } else {
        Base::template store_plain<N>(d[slice], tile.count, first, slots);
      }
    }
    if constexpr (kProduct == Product::kUp) {
      Base::template store_values<N>(d, tile, feature_tile);
    }
  }

  template <Product kProduct>
  __device__ __forceinline__ void run_item(const Item& item) {
    with_width<Config>(item.tile.count, [&]<int N>() {
      if constexpr (kPaired && kProduct == Product::kUp) {
        run_gated<N>(item.tile, item.feature_tile);
      } else {
        run_plain<N, kProduct>(item.tile, item.feature_tile);
      }
    });
  }
};

template <class Config, Product kProduct>
__global__ void __launch_bounds__(Config::kThreads, 1)
    adapted_bytes_product(const __grid_constant__ AdaptedParams params) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  run_adapted_block<Config, kProduct, AdaptedByteConsumer<Config>>(
      params, *reinterpret_cast<SharedStorage<Config>*>(bytes));
}

}  // namespace conclave::inline v0::experts::stream

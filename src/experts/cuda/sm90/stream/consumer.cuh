// Consumers of bf16 and f16 rows: they multiply an item, complete its sums and store them.
#pragma once

#include "experts/cuda/sm90/stream/epilogue.cuh"
#include "experts/cuda/sm90/stream/products.cuh"
#include "experts/cuda/sm90/stream/walk.cuh"

#include <utility>

namespace conclave::inline v0::experts::stream {

template <class Config>
struct Consumer : Products<Config> {
  using Base = Products<Config>;
  using Base::Base;
  using Base::kSlices;
  using Base::lane;
  using Base::params;
  using typename Base::Sums;

  // Biases of the thread's two rows: gate and up of feature `own`, or that and the one eight below.
  __device__ __forceinline__ float2 biases_of(int32_t expert, int32_t own, bool gated) const {
    const int32_t rows = gated ? 2 * params.features : params.features;
    const int64_t first = int64_t{expert} * rows + own;
    if (gated) return {Base::bias_of(first, own), Base::bias_of(first + params.features, own)};
    return {Base::bias_of(first, own), Base::bias_of(first + 8, own + 8)};
  }

  // Tokens whose sums are completed and stored at once. Each width has its products in the code;
  // what follows them is there once for all widths, for as many tokens as a tile has at most.
  static constexpr int kChunk = 32;
  template <class Run>
  static __device__ __forceinline__ void for_each_chunk(const TokenTile& tile, const Run& run) {
    constexpr int kChunks = (Config::kMaxTokens + kChunk - 1) / kChunk;
    [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
      (run_chunk<kIndices>(tile, run), ...);
    }(std::make_integer_sequence<int, kChunks>());
  }
  template <int kIndex, class Run>
  static __device__ __forceinline__ void run_chunk(const TokenTile& tile, const Run& run) {
    constexpr int kFirst = kIndex * kChunk;
    constexpr int kLeft = Config::kMaxTokens - kFirst;
    if (tile.count <= kFirst) return;
    run.template operator()<kFirst, (kLeft < kChunk ? kLeft : kChunk)>(TokenTile{
        .expert = tile.expert, .begin = tile.begin + kFirst, .count = tile.count - kFirst});
  }

  template <int kFirst, int N>
  static __device__ __forceinline__ void take(float (&d)[kSlices][N / 2], const Sums& sums) {
#pragma unroll
    for (int i = 0; i < kSlices * N / 2; ++i) {
      d[i / (N / 2)][i % (N / 2)] = sums[i / (N / 2)][kFirst / 2 + i % (N / 2)];
    }
  }
  template <int kFirst, int N>
  static __device__ __forceinline__ void put(Sums& sums, const float (&d)[kSlices][N / 2]) {
#pragma unroll
    for (int i = 0; i < kSlices * N / 2; ++i) {
      sums[i / (N / 2)][kFirst / 2 + i % (N / 2)] = d[i / (N / 2)][i % (N / 2)];
    }
  }

  __device__ __forceinline__ void run_up(const TokenTile& tile, int32_t feature_tile) {
    const bool gated = params.activation.gated;
    const int32_t features_of_warp = gated ? 8 : 16;
    int32_t first[kSlices];
    float2 biases[kSlices];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      first[slice] = Base::first_feature(feature_tile, slice, features_of_warp);
      biases[slice] = biases_of(tile.expert, first[slice] + lane / 4, gated);
    }
    Sums sums;
    with_width<Config>(tile.count,
                       [&]<int N>() { Base::template multiply<N, Product::kUp>(sums); });
    switch (Base::finish_of_up()) {
      case Finish::kSilu:
        return finish_gated<Finish::kSilu>(sums, tile, feature_tile, first, biases);
      case Finish::kBiasedSwiglu:
        return finish_gated<Finish::kBiasedSwiglu>(sums, tile, feature_tile, first, biases);
      case Finish::kAny:
        return finish_up(sums, tile, feature_tile, first, biases);
    }
  }

  template <Finish kFinish>
  __device__ __forceinline__ void finish_gated(const Sums& sums, const TokenTile& tile,
                                               int32_t feature_tile,
                                               const int32_t (&first)[kSlices],
                                               const float2 (&biases)[kSlices]) {
    for_each_chunk(tile, [&]<int kFirst, int N>(const TokenTile& part) {
      float d[kSlices][N / 2];
      take<kFirst, N>(d, sums);
      Base::template complete_exact<N, Product::kUp>(d[0], part.expert);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        if constexpr (kFinish == Finish::kSilu) {
          Base::template activate_silu<N>(d[slice]);
        } else {
          Base::template add_bias<N>(d[slice], biases[slice].x, biases[slice].y);
          Base::template activate_swiglu<N>(d[slice]);
        }
      }
      store_gated<N, true>(d, part, feature_tile, first);
    });
  }

  // The same for every activation, factor and store.
  __device__ __forceinline__ void finish_up(Sums& sums, const TokenTile& tile, int32_t feature_tile,
                                            const int32_t (&first)[kSlices],
                                            const float2 (&biases)[kSlices]) {
    const bool gated = params.activation.gated;
    for_each_chunk(tile, [&]<int kFirst, int N>(const TokenTile& part) {
      float d[kSlices][N / 2];
      take<kFirst, N>(d, sums);
      Base::template complete_exact<N, Product::kUp>(d[0], part.expert);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        Base::template scale_rows<N, Product::kUp>(d[slice], part);
        Base::template weigh_and_bias<N>(d[slice], part, biases[slice].x, biases[slice].y);
      }
      put<kFirst, N>(sums, d);
    });
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      Base::template activate<Config::kMaxTokens>(sums[slice], (tile.count + 7) / 8 * 8);
    }
    for_each_chunk(tile, [&]<int kFirst, int N>(const TokenTile& part) {
      float d[kSlices][N / 2];
      take<kFirst, N>(d, sums);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        Base::template scale_columns<N>(d[slice], part.expert, first[slice] + lane / 4, gated);
        if (Base::stores_floats()) {
          Base::template store_floats<N>(d[slice], part, first[slice] + lane / 4, gated);
        }
      }
      if (Base::stores_floats()) return;
      if (gated) {
        store_gated<N, false>(d, part, feature_tile, first);
      } else {
        int32_t slots[1];
        Base::template find_slots<N, Product::kUp>(part, slots);
        store_plain<N, false>(d, part, feature_tile, first, slots);
      }
    });
  }

  template <int N, bool kWide>
  __device__ __forceinline__ void store_gated(const float (&d)[kSlices][N / 2],
                                              const TokenTile& tile, int32_t feature_tile,
                                              const int32_t (&first)[kSlices]) {
    if constexpr (Config::kWholeLines) {
      const int32_t feature = Base::first_of_group(feature_tile, 8);
      Base::template store_gated_lines<N, kWide>(d, tile, feature);
    } else {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        Base::template store_gated<N, kWide>(d[slice], tile, first[slice]);
      }
    }
  }
  template <int N, bool kWide>
  __device__ __forceinline__ void store_plain(const float (&d)[kSlices][N / 2],
                                              const TokenTile& tile, int32_t feature_tile,
                                              const int32_t (&first)[kSlices],
                                              const int32_t (&slots)[1]) {
    if constexpr (Config::kWholeLines) {
      const int32_t feature = Base::first_of_group(feature_tile, 16);
      Base::template store_plain_lines<N, kWide>(d, tile.count, feature, slots);
    } else {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        Base::template store_plain<N, kWide>(d[slice], tile.count, first[slice], slots);
      }
    }
  }

  __device__ __forceinline__ void run_down(const TokenTile& tile, int32_t feature_tile) {
    int32_t first[kSlices];
    float2 biases[kSlices];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      first[slice] = Base::first_feature(feature_tile, slice, 16);
      biases[slice] = biases_of(tile.expert, first[slice] + lane / 4, false);
    }
    int32_t slots[(Config::kMaxTokens + 31) / 32];
    Base::template find_slots<Config::kMaxTokens, Product::kDown>(tile, slots);
    Sums sums;
    with_width<Config>(tile.count,
                       [&]<int N>() { Base::template multiply<N, Product::kDown>(sums); });
    if (Base::stores_sums()) {
      for_each_chunk(tile, [&]<int kFirst, int N>(const TokenTile& part) {
        float d[kSlices][N / 2];
        take<kFirst, N>(d, sums);
        Base::template complete_exact<N, Product::kDown>(d[0], part.expert);
        store_plain<N, true>(d, part, feature_tile, first, {slots[kFirst / kChunk]});
      });
      return;
    }
    for_each_chunk(tile, [&]<int kFirst, int N>(const TokenTile& part) {
      float d[kSlices][N / 2];
      take<kFirst, N>(d, sums);
      Base::template complete_exact<N, Product::kDown>(d[0], part.expert);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        Base::template scale_rows<N, Product::kDown>(d[slice], part);
        Base::template add_bias<N>(d[slice], biases[slice].x, biases[slice].y);
      }
      store_plain<N, false>(d, part, feature_tile, first, {slots[kFirst / kChunk]});
    });
  }

  template <Product kProduct>
  __device__ __forceinline__ void run_item(const Item& item) {
    if constexpr (kProduct == Product::kUp) {
      run_up(item.tile, item.feature_tile);
    } else {
      run_down(item.tile, item.feature_tile);
    }
  }

  // Counts for the down product that this warp has stored its part of an item. Warpgroups do not
  // meet for it: one may be stages ahead of the others.
  __device__ __forceinline__ void count_item(const Item& item) const {
    if (params.items_before == 0) return;
    __syncwarp();
    if (lane == 0) ptx::add_release(&params.tiles[item.tile_index].done, 1);
  }
};

}  // namespace conclave::inline v0::experts::stream

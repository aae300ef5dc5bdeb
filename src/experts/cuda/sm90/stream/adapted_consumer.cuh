// Consumers that add adapters' terms to the sums of rows once these are products of whole numbers
// and scales, before they are weighed, so that rows without an adapter keep every bit.
#pragma once

#include "experts/cuda/adapters/add_terms.cuh"
#include "experts/cuda/sm90/stream/consumer.cuh"

#include <type_traits>

namespace conclave::inline v0::experts::stream {

// Parameters of a product whose rows may have adapters.
template <class Parameters>
struct Adapted : Parameters {
  const RowFactors* factors = nullptr;  // [sorted rows]
  const float* terms = nullptr;         // [sorted rows, term_stride]
  int64_t term_stride = 0;
};
using AdaptedParams = Adapted<Params>;
using AdaptedCodedParams = Adapted<CodedParams>;

template <class Parameters>
Adapted<Parameters> with_terms(Adapted<Parameters> params, const AdapterTerms& terms) {
  params.factors = terms.rows;
  params.terms = terms.terms;
  params.term_stride = terms.stride;
  return params;
}

// Adds to the sums d of an item: d[4j] and d[4j + 1] are those of `first`, a row of B's half 0, and
// d[4j + 2] and d[4j + 3] those of `second`, a row of half `half`.
template <int N, class OwnParams>
__device__ __forceinline__ void add_terms(float (&d)[N / 2], const OwnParams& params,
                                          const TokenTile& tile, int32_t lane, int32_t first,
                                          int32_t second, int half) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const int32_t token = i / 2 * 8 + lane % 4 * 2 + i % 2;
    if (token >= tile.count) continue;
    const int64_t row = int64_t{tile.begin} + token;
    const RowFactors factors = params.factors[row];
    if (factors.rank[0] == 0 && factors.rank[1] == 0) continue;
    const float* const terms = params.terms + row * params.term_stride;
    const int at = i / 2 * 4 + i % 2;
    if (first < params.features) d[at] += adapters::delta_of(factors, 0, first, terms);
    if (second < params.features) d[at + 2] += adapters::delta_of(factors, half, second, terms);
  }
  __syncwarp();
}

template <class Config>
struct AdaptedConsumer : Consumer<Config> {
  using Base = Consumer<Config>;
  using Base::Base;
  using Base::kChunk;
  using Base::kSlices;
  using Base::lane;
  using Base::params;
  using typename Base::Sums;
  using OwnParams = std::conditional_t<Config::kIsCoded, AdaptedCodedParams, AdaptedParams>;

  // Completes the sums and adds terms to them.
  template <Product kProduct>
  __device__ __forceinline__ void complete(Sums& sums, const TokenTile& tile,
                                           const int32_t (&first)[kSlices], bool gated) {
    Base::for_each_chunk(tile, [&]<int kFirst, int N>(const TokenTile& part) {
      float d[kSlices][N / 2];
      Base::template take<kFirst, N>(d, sums);
      Base::template complete_exact<N, kProduct>(d[0], part.expert);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        Base::template scale_rows<N, kProduct>(d[slice], part);
        const int32_t feature = first[slice] + lane / 4;
        add_terms<N>(d[slice], static_cast<const OwnParams&>(params), part, lane, feature,
                     gated ? feature : feature + 8, gated ? 1 : 0);
      }
      Base::template put<kFirst, N>(sums, d);
    });
  }

  __device__ __forceinline__ void run_up(const TokenTile& tile, int32_t feature_tile) {
    const bool gated = params.activation.gated;
    int32_t first[kSlices];
    float2 biases[kSlices];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      first[slice] = Base::first_feature(feature_tile, slice, gated ? 8 : 16);
      biases[slice] = Base::biases_of(tile.expert, first[slice] + lane / 4, gated);
    }
    Sums sums;
    with_width<Config>(tile.count,
                       [&]<int N>() { Base::template multiply<N, Product::kUp>(sums); });
    complete<Product::kUp>(sums, tile, first, gated);
    Base::for_each_chunk(tile, [&]<int kFirst, int N>(const TokenTile& part) {
      float d[kSlices][N / 2];
      Base::template take<kFirst, N>(d, sums);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        Base::template weigh_and_bias<N>(d[slice], part, biases[slice].x, biases[slice].y);
        Base::template activate<N>(d[slice], (part.count + 7) / 8 * 8);
      }
      store_up<N>(d, part, feature_tile, first, gated);
    });
  }

  template <int N>
  __device__ __forceinline__ void store_up(const float (&d)[kSlices][N / 2], const TokenTile& part,
                                           int32_t feature_tile, const int32_t (&first)[kSlices],
                                           bool gated) {
    if (Base::stores_floats()) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        Base::template store_floats<N>(d[slice], part, first[slice] + lane / 4, gated);
      }
    } else if (gated) {
      Base::template store_gated<N, false>(d, part, feature_tile, first);
    } else {
      int32_t slots[1];
      Base::template find_slots<N, Product::kUp>(part, slots);
      Base::template store_plain<N, false>(d, part, feature_tile, first, slots);
    }
  }

  __device__ __forceinline__ void run_down(const TokenTile& tile, int32_t feature_tile) {
    int32_t first[kSlices];
    float2 biases[kSlices];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      first[slice] = Base::first_feature(feature_tile, slice, 16);
      biases[slice] = Base::biases_of(tile.expert, first[slice] + lane / 4, false);
    }
    int32_t slots[(Config::kMaxTokens + 31) / 32];
    Base::template find_slots<Config::kMaxTokens, Product::kDown>(tile, slots);
    Sums sums;
    with_width<Config>(tile.count,
                       [&]<int N>() { Base::template multiply<N, Product::kDown>(sums); });
    complete<Product::kDown>(sums, tile, first, false);
    Base::for_each_chunk(tile, [&]<int kFirst, int N>(const TokenTile& part) {
      float d[kSlices][N / 2];
      Base::template take<kFirst, N>(d, sums);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        Base::template add_bias<N>(d[slice], biases[slice].x, biases[slice].y);
      }
      Base::template store_plain<N, false>(d, part, feature_tile, first, {slots[kFirst / kChunk]});
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
};

}  // namespace conclave::inline v0::experts::stream

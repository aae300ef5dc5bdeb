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

template <class OwnParams>
__device__ __forceinline__ RowFactors factors_of(const OwnParams& params, const TokenTile& tile,
                                                 int32_t token) {
  return token < tile.count ? params.factors[int64_t{tile.begin} + token] : RowFactors();
}
template <class OwnParams>
__device__ __forceinline__ const float* terms_of(const OwnParams& params, const TokenTile& tile,
                                                 int32_t token) {
  return params.terms + (int64_t{tile.begin} + token) * params.term_stride;
}

// The first eight tokens of a tile multiply this first. It is asked for before the tile's
// products, so that the epilogue has it at hand.
template <class OwnParams>
__device__ __forceinline__ adapters::EarlyStep early_step(const OwnParams& params,
                                                          const TokenTile& tile, int32_t lane,
                                                          const adapters::WarpRows& rows) {
  adapters::EarlyStep early{.own = factors_of(params, tile, lane / 4)};
  adapters::load_early(early, terms_of(params, tile, lane / 4), rows, lane);
  return early;
}

// Adds to the sums d of an item's tokens. With kIsEarly, `early` is of the first of them.
template <int N, bool kIsEarly, class OwnParams>
__device__ __forceinline__ void add_terms(float (&d)[N / 2], const OwnParams& params,
                                          const TokenTile& tile, int32_t lane,
                                          const adapters::EarlyStep& early,
                                          const adapters::WarpRows& rows) {
  RowFactors factors[N / 8];
#pragma unroll
  for (int j = kIsEarly ? 1 : 0; j < N / 8; ++j) {
    factors[j] = factors_of(params, tile, 8 * j + lane / 4);
  }
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    if (8 * j >= tile.count) break;
    const float* const terms = terms_of(params, tile, 8 * j + lane / 4);
    float c[4] = {d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]};
    if constexpr (kIsEarly) {
      if (j == 0) {
        adapters::add_to_eight<true>(c, early, terms, rows, lane);
      } else {
        adapters::add_to_eight<false>(c, {.own = factors[j]}, terms, rows, lane);
      }
    } else {
      adapters::add_to_eight<false>(c, {.own = factors[j]}, terms, rows, lane);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) d[4 * j + i] = c[i];
  }
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

  __device__ __forceinline__ const OwnParams& own() const {
    return static_cast<const OwnParams&>(params);
  }

  __device__ __forceinline__ adapters::WarpRows rows_of(int32_t feature, bool gated) const {
    return {.first = feature,
            .second = gated ? feature : feature + 8,
            .half = gated ? 1 : 0,
            .features = params.features};
  }

  // Completes the sums and adds terms to them. `early` is of the first slice.
  template <Product kProduct>
  __device__ __forceinline__ void complete(Sums& sums, const TokenTile& tile,
                                           const adapters::EarlyStep& early,
                                           const int32_t (&first)[kSlices], bool gated) {
    Base::for_each_chunk(tile, [&]<int kFirst, int N>(const TokenTile& part) {
      float d[kSlices][N / 2];
      Base::template take<kFirst, N>(d, sums);
      Base::template complete_exact<N, kProduct>(d[0], part.expert);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        Base::template scale_rows<N, kProduct>(d[slice], part);
        const adapters::WarpRows rows = rows_of(first[slice] + lane / 4, gated);
        add_terms<N, kFirst == 0 && kSlices == 1>(d[slice], own(), part, lane, early, rows);
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
    const adapters::EarlyStep early =
        early_step(own(), tile, lane, rows_of(first[0] + lane / 4, gated));
    Sums sums;
    with_width<Config>(tile.count,
                       [&]<int N>() { Base::template multiply<N, Product::kUp>(sums); });
    complete<Product::kUp>(sums, tile, early, first, gated);
    if (Base::finish_of_up() == Finish::kSilu) return finish_silu(sums, tile, feature_tile, first);
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

  // The same without what such layers do not have.
  __device__ __forceinline__ void finish_silu(const Sums& sums, const TokenTile& tile,
                                              int32_t feature_tile,
                                              const int32_t (&first)[kSlices]) {
    Base::for_each_chunk(tile, [&]<int kFirst, int N>(const TokenTile& part) {
      float d[kSlices][N / 2];
      Base::template take<kFirst, N>(d, sums);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) Base::template activate_silu<N>(d[slice]);
      Base::template store_gated<N, true>(d, part, feature_tile, first);
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
    const adapters::EarlyStep early =
        early_step(own(), tile, lane, rows_of(first[0] + lane / 4, false));
    Sums sums;
    with_width<Config>(tile.count,
                       [&]<int N>() { Base::template multiply<N, Product::kDown>(sums); });
    complete<Product::kDown>(sums, tile, early, first, false);
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

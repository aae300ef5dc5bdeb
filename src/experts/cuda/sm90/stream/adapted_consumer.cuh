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

// Eight tokens multiply this first; the lane has one of them.
template <class OwnParams>
__device__ __forceinline__ adapters::EarlyStep step_of(const OwnParams& params,
                                                       const TokenTile& tile, int32_t first,
                                                       int32_t lane,
                                                       const adapters::WarpRows& rows) {
  const int32_t token = first + lane / 4;
  adapters::EarlyStep step{.own = factors_of(params, tile, token)};
  adapters::load_early(step, terms_of(params, tile, token), rows, lane);
  return step;
}
// That of a tile's first tokens is asked for before the tile's products, so that the epilogue has
// it at hand.
template <class OwnParams>
__device__ __forceinline__ adapters::EarlyStep early_step(const OwnParams& params,
                                                          const TokenTile& tile, int32_t lane,
                                                          const adapters::WarpRows& rows) {
  return step_of(params, tile, 0, lane, rows);
}

// Adds to the sums d of an item's tokens. With kIsEarly, `early` is of the first of them. The code
// is there once for all of them: sums come to the front and go to the end, since registers have no
// index.
template <int N, bool kIsEarly, class OwnParams>
__device__ __forceinline__ void add_terms(float (&d)[N / 2], const OwnParams& params,
                                          const TokenTile& tile, int32_t lane,
                                          const adapters::EarlyStep& early,
                                          const adapters::WarpRows& rows) {
  adapters::EarlyStep step = kIsEarly ? early : early_step(params, tile, lane, rows);
#pragma unroll 1
  for (int32_t first = 0; first < N; first += 8) {
    float c[4] = {d[0], d[1], d[2], d[3]};
    if (first < tile.count) {
      const adapters::EarlyStep now = step;
      if (first + 8 < tile.count) step = step_of(params, tile, first + 8, lane, rows);
      adapters::add_to_eight(c, now, terms_of(params, tile, first + lane / 4), rows, lane);
    }
#pragma unroll
    for (int i = 0; i < N / 2 - 4; ++i) d[i] = d[i + 4];
#pragma unroll
    for (int i = 0; i < 4; ++i) d[N / 2 - 4 + i] = c[i];
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

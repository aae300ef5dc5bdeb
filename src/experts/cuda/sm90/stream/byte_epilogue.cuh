// The epilogue of products of bytes: what scales and bias the sums still need, and the intermediate
// as codes with scales of their own.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "experts/cuda/common/e4m3.cuh"
#include "experts/cuda/sm90/stream/epilogue.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::stream {

// The up product has 256 weight rows per block with a gate and 128 without. Both make 128 features,
// the columns that share a scale of the intermediate.
template <class Config>
struct ByteEpilogue : Epilogue<Config> {
  using Base = Epilogue<Config>;
  using Base::Base;
  using Base::kSlices;
  using Base::lane;
  using Base::params;
  using Base::shared;
  using Base::warp;
  static constexpr bool kPaired = kSlices == 2;  // in up: gate and up rows
  static constexpr uint32_t kConsumers = 32 * Config::kConsumerWarps;
  static constexpr uint32_t kConsumerBarrier = 1;

  // The factor that a token's sums still need: the row's scale, unless block scales were applied,
  // and the slot's weight if it applies to the input.
  template <Product kProduct>
  __device__ __forceinline__ float token_factor(const TokenTile& tile, int32_t token) const {
    if (token >= tile.count) return 0.0F;
    const int32_t row = tile.begin + token;
    float factor = 1.0F;
    if constexpr (!Config::kBlockScales) {
      const ScaleParams& scales = params.scales;
      if (scales.constant != nullptr) {
        factor = *scales.constant;
      } else {
        const int64_t from =
            kRowsInOrder<Config, kProduct> ? row : params.row_slot[row] / params.top_k;
        factor = scales.tokens[from * scales.row_stride];
      }
    }
    if (kProduct == Product::kUp && params.input_weights != nullptr) {
      factor *= params.input_weights[params.row_slot[row]];
    }
    return factor;
  }

  // The scales that the sums' two weight rows still need, and their biases.
  struct RowPair {
    float scale[2];
    float bias[2];
  };

  // Holds the factors of a thread's tokens where rows have a scale each: they are fetched before
  // the products, which hide loads that wait for each other. Block scales leave no registers for
  // it.
  template <int N>
  struct TokenFactors {
    float of[Config::kBlockScales ? 1 : N / 4];
  };
  static __device__ __forceinline__ int32_t token_of(int32_t lane, int i) {
    return i / 2 * 8 + lane % 4 * 2 + i % 2;
  }
  template <int N, Product kProduct>
  __device__ __forceinline__ TokenFactors<N> find_factors(const TokenTile& tile) const {
    TokenFactors<N> factors = {};
    if constexpr (!Config::kBlockScales) {
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {
        factors.of[i] = token_factor<kProduct>(tile, token_of(lane, i));
      }
    }
    return factors;
  }

  template <int N, Product kProduct>
  __device__ __forceinline__ float factor_of(const TokenTile& tile, const TokenFactors<N>& factors,
                                             int i) const {
    if constexpr (Config::kBlockScales) return token_factor<kProduct>(tile, token_of(lane, i));
    return factors.of[i];
  }

  // Applies scales and bias in one rounding, which equals tile_bytes/epilogue.cuh bit for bit.
  template <int N, Product kProduct>
  __device__ __forceinline__ void scale_and_bias(float (&d)[N / 2], const TokenTile& tile,
                                                 const RowPair& rows,
                                                 const TokenFactors<N>& factors) const {
    if (Config::kBlockScales && params.bias == nullptr && params.input_weights == nullptr) return;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const float factor = factor_of<N, kProduct>(tile, factors, i);
      float& first = d[i / 2 * 4 + i % 2];
      float& second = d[i / 2 * 4 + i % 2 + 2];
      first = fmaf(first, factor * rows.scale[0], rows.bias[0]);
      second = fmaf(second, factor * rows.scale[1], rows.bias[1]);
    }
  }

  // The scale of a weight row, or 1 with block scales.
  __device__ __forceinline__ float row_scale(int64_t index, int32_t feature) const {
    if constexpr (Config::kBlockScales) return 1.0F;
    return feature < params.features ? params.scales.weights[index] : 0.0F;
  }

  // Value v of token t in column group j. A thread has two features, which are 32 apart with a gate
  // and 8 without.
  template <int N>
  static __device__ __forceinline__ float& value_of(float (&d)[kSlices][N / 2], int j, int v,
                                                    int t) {
    if constexpr (kPaired) return d[v][4 * j + t];
    return d[0][4 * j + 2 * v + t];
  }
  // The feature of value 0 among the block's 128.
  __device__ __forceinline__ int32_t own_feature() const {
    return warp / 4 * 64 + warp % 4 * (kPaired ? 8 : 16) + lane / 4;
  }
  static constexpr int kFeatureStep = kPaired ? 32 : 8;

  template <int N>
  __device__ __forceinline__ void clear_beyond(float (&d)[kSlices][N / 2],
                                               int32_t feature_tile) const {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      if (feature_tile * kScaleGroup + own_feature() + v * kFeatureStep < params.features) continue;
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        value_of<N>(d, j, v, 0) = 0.0F;
        value_of<N>(d, j, v, 1) = 0.0F;
      }
    }
  }

  // Finds the largest magnitude of each token over this warp's features.
  template <int N>
  __device__ __forceinline__ void find_largest(float (&d)[kSlices][N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      float largest = fmaxf(0.0F, fabsf(value_of<N>(d, i / 2, 0, i % 2)));
      largest = fmaxf(largest, fabsf(value_of<N>(d, i / 2, 1, i % 2)));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
      }
      if (lane < 4) shared.staging.largest[warp][i / 2 * 8 + lane * 2 + i % 2] = largest;
    }
  }

  __device__ __forceinline__ void put_step(int32_t token, float scale) {
    const quant::InverseStep step = quant::invert_step(scale);
    shared.staging.steps.factor[token] = step.factor;
    shared.staging.steps.inverse[token] = step.inverse;
  }
  __device__ __forceinline__ quant::InverseStep step_of(int token) const {
    return {shared.staging.steps.factor[token], shared.staging.steps.inverse[token]};
  }

  // Makes the scale of each token's group, a thread for each token, and stores it unless it is a
  // constant.
  __device__ __forceinline__ void make_scales(const TokenTile& tile, int32_t feature_tile) {
    const auto token = static_cast<int32_t>(threadIdx.x);
    if (token >= tile.count) return;
    const ScaleParams& scales = params.scales;
    if (scales.output_constant != nullptr) {
      put_step(token, *scales.output_constant);
      return;
    }
    float largest = 0.0F;
#pragma unroll
    for (int i = 0; i < Config::kConsumerWarps; ++i) {
      largest = fmaxf(largest, shared.staging.largest[i][token]);
    }
    const float scale = group_scale(largest, scales.power_of_two);
    put_step(token, scale);
    scales.output[feature_tile * scales.output_stride + tile.begin + token] = scale;
  }

  template <int N>
  __device__ __forceinline__ void stage_codes(float (&d)[kSlices][N / 2]) {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      const int token = 8 * j + lane % 4 * 2;
      const quant::InverseStep first = step_of(token);
      const quant::InverseStep second = step_of(token + 1);
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const uint32_t codes = pack_e4m3(quant::code_quotient(value_of<N>(d, j, v, 0), first),
                                         quant::code_quotient(value_of<N>(d, j, v, 1), second));
        const int32_t feature = own_feature() + v * kFeatureStep;
        shared.staging.codes[token][feature] = static_cast<uint8_t>(codes);
        shared.staging.codes[token + 1][feature] = static_cast<uint8_t>(codes >> 8);
      }
    }
  }

  // Stores whole rows of the group; the intermediate's rows are padded to 16 codes.
  __device__ __forceinline__ void store_codes(const TokenTile& tile, int32_t feature_tile) const {
    for (auto i = static_cast<int32_t>(threadIdx.x); i < tile.count * (kScaleGroup / 16);
         i += static_cast<int32_t>(kConsumers)) {
      const int32_t token = i / (kScaleGroup / 16);
      const int32_t column = i % (kScaleGroup / 16) * 16;
      const int32_t feature = feature_tile * kScaleGroup + column;
      if (feature >= params.features) continue;
      auto* row = static_cast<uint8_t*>(params.output) +
                  (tile.begin + token) * params.output_stride + feature;
      *reinterpret_cast<uint4*>(row) =
          *reinterpret_cast<const uint4*>(&shared.staging.codes[token][column]);
    }
  }

  template <int N>
  __device__ __forceinline__ void store_values(float (&d)[kSlices][N / 2], const TokenTile& tile,
                                               int32_t feature_tile) const {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const int32_t token = i / 2 * 8 + lane % 4 * 2 + i % 2;
      if (token >= tile.count) continue;
      float* row = static_cast<float*>(params.output) + (tile.begin + token) * params.output_stride;
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int32_t feature = feature_tile * kScaleGroup + own_feature() + v * kFeatureStep;
        if (feature < params.features) row[feature] = value_of<N>(d, i / 2, v, i % 2);
      }
    }
  }

  template <int N>
  __device__ __forceinline__ void store_intermediate(float (&d)[kSlices][N / 2],
                                                     const TokenTile& tile, int32_t feature_tile) {
    if (!Config::kBlockScales && params.scales.output_constant == nullptr) {
      store_values<N>(d, tile, feature_tile);
      return;
    }
    clear_beyond<N>(d, feature_tile);
    if constexpr (Config::kBlockScales) find_largest<N>(d);
    ptx::named_barrier_sync(kConsumerBarrier, kConsumers);
    make_scales(tile, feature_tile);
    ptx::named_barrier_sync(kConsumerBarrier, kConsumers);
    stage_codes<N>(d);
    ptx::named_barrier_sync(kConsumerBarrier, kConsumers);
    store_codes(tile, feature_tile);
  }

  __device__ __forceinline__ void describe_row(RowPair& rows, int i, int64_t index,
                                               int32_t feature) const {
    rows.scale[i] = row_scale(index, feature);
    rows.bias[i] = Base::bias_of(index, feature);
  }

  // Finishes rows that are the only ones of their tokens, so that nothing is left for combine.
  template <int N>
  __device__ __forceinline__ void finish_rows(float (&d)[N / 2], int32_t count,
                                              const int32_t (&slots)[(N + 31) / 32]) const {
    if (!params.finishes_rows) return;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const int32_t token = i / 2 * 8 + lane % 4 * 2 + i % 2;
      const int32_t slot = __shfl_sync(0xffffffff, slots[i / 8], token % 32);
      float weight = 1.0F;
      if (params.finish_weights != nullptr && token < count) weight = params.finish_weights[slot];
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        float& sum = d[i / 2 * 4 + i % 2 + 2 * v];
        sum = finish_sum(sum, weight, params.finish_scale);
      }
    }
  }

  // Counts for the down product that this item has been stored.
  __device__ __forceinline__ void count_item(const Item& item) {
    if (params.items_before == 0) return;
    ptx::named_barrier_sync(kConsumerBarrier, kConsumers);
    if (threadIdx.x != 0) return;
    __threadfence();
    ptx::add_release(&params.tiles[item.tile_index].done, 1);
  }
};

}  // namespace conclave::inline v0::experts::stream

// The products of e4m3: wgmma's partial sum over 128 columns of K is added, times its scales, to
// float32 sums, since wgmma alone adds e4m3 products with fewer bits.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/wgmma.cuh"
#include "experts/cuda/common/e4m3.cuh"
#include "experts/cuda/sm90/stream/rows.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::stream {

// Up has 256 weight rows per block with a gate and 128 without. Both make 128 features, the columns
// that share a scale of the intermediate.
template <class Config>
struct Fp8Consumer : TileThread<Config> {
  using Base = TileThread<Config>;
  using Base::Base;
  using Base::kSlices;
  using Base::lane;
  using Base::params;
  using Base::release;
  using Base::ring;
  using Base::shared;
  using Base::warp;
  static constexpr bool kPaired = kSlices == 2;  // in up: gate and up rows
  static constexpr int kGroup = 128;
  static constexpr uint32_t kConsumers = 32 * Config::kConsumerWarps;
  static constexpr uint32_t kConsumerBarrier = 1;

  template <int N>
  __device__ __forceinline__ void multiply_atom(float (&partial)[N / 2], int atom,
                                                int slice) const {
    const uint64_t a = cuda::device::wgmma_descriptor_128b(
        cuda::device::shared_address(shared.weights[ring.slot][atom]) +
        (warp / 4 * kSlices + slice) * (64 * Config::kAtomBytes));
    const uint64_t b = cuda::device::wgmma_descriptor_128b(
        cuda::device::shared_address(shared.tokens[ring.slot][atom]));
    cuda::device::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kAtomBytes / 32; ++k) {
      cuda::device::Wgmma<__nv_fp8_e4m3, N>::mma(partial, a + 2 * k, b + 2 * k, k > 0);
    }
    cuda::device::wgmma_commit_group();
    cuda::device::wgmma_wait_group<0>();
#pragma unroll
    for (float& value : partial) cuda::device::wgmma_fence_operand(value);
  }

  template <int N>
  __device__ __forceinline__ void promote(const float (&partial)[N / 2], float (&d)[N / 2],
                                          int atom, float low, float high) const {
    const float* scales = shared.token_scales[ring.slot][atom] + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      if constexpr (Config::kBlockScales) {
        const float2 token = *reinterpret_cast<const float2*>(scales + 8 * j);
        d[4 * j] = fmaf(partial[4 * j], low * token.x, d[4 * j]);
        d[4 * j + 1] = fmaf(partial[4 * j + 1], low * token.y, d[4 * j + 1]);
        d[4 * j + 2] = fmaf(partial[4 * j + 2], high * token.x, d[4 * j + 2]);
        d[4 * j + 3] = fmaf(partial[4 * j + 3], high * token.y, d[4 * j + 3]);
      } else {
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i) d[i] += partial[i];
      }
    }
  }

  // Scales of the sums' weight rows lane / 4 and lane / 4 + 8: those of gate and up, or the
  // warpgroup's one for both.
  template <Side kSide>
  __device__ __forceinline__ float2 block_scales(int atom) const {
    if constexpr (!Config::kBlockScales) return {};
    const float* scales = shared.weight_scales[ring.slot][atom];
    if (kSide == Side::kUp && kPaired) return {scales[0], scales[1]};
    const float scale = scales[kPaired ? warp / 4 : 0];
    return {scale, scale};
  }

  template <int N, Side kSide>
  __device__ __forceinline__ void multiply(float (&d)[kSlices][N / 2]) {
    float partial[N / 2];
#pragma unroll
    for (int i = 0; i < kSlices * N / 2; ++i) d[i / (N / 2)][i % (N / 2)] = 0.0F;
#pragma unroll
    for (float& value : partial) value = 0.0F;
    for (int32_t stage = 0; stage < params.depth_stages; ++stage) {
      cuda::device::mbarrier_wait(&shared.full[ring.slot], ring.phase);
      // cp.async writes through the generic proxy, wgmma reads through the async proxy.
      if constexpr (!kRowsInOrder<Config, kSide>) cuda::device::fence_proxy_async_shared();
#pragma unroll
      for (int atom = 0; atom < Config::kAtoms; ++atom) {
        const float2 scales = block_scales<kSide>(atom);
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
          multiply_atom<N>(partial, atom, slice);
          promote<N>(partial, d[slice], atom, scales.x, scales.y);
        }
      }
      __syncwarp();
      release(ring.slot);
      ring.advance();
    }
  }

  // Factor that a token's sums still need: the row's scale, unless block scales were applied, and
  // the slot's weight if it applies to the input.
  template <Side kSide>
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
            kRowsInOrder<Config, kSide> ? row : params.row_slot[row] / params.top_k;
        factor = scales.tokens[from * scales.row_stride];
      }
    }
    if (kSide == Side::kUp && params.input_weights != nullptr) {
      factor *= params.input_weights[params.row_slot[row]];
    }
    return factor;
  }

  // Scales that the sums' two weight rows still need, and their biases.
  struct RowPair {
    float scale[2];
    float bias[2];
  };

  // Applies scales and bias in one rounding, which equals tile_fp8_epilogue.cuh bit for bit.
  template <int N, Side kSide>
  __device__ __forceinline__ void scale_and_bias(float (&d)[N / 2], const TokenTile& tile,
                                                 const RowPair& rows) const {
    if (Config::kBlockScales && params.bias == nullptr && params.input_weights == nullptr) return;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const float factor = token_factor<kSide>(tile, i / 2 * 8 + lane % 4 * 2 + i % 2);
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

  // Value v of token t of column group j. A thread has two features, 32 (with a gate) or 8 apart.
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
      if (feature_tile * kGroup + own_feature() + v * kFeatureStep < params.features) continue;
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

  // Makes the scale of each token's group and, unless it is a constant, stores it in memory too.
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
    for (auto i = static_cast<int32_t>(threadIdx.x); i < tile.count * (kGroup / 16);
         i += static_cast<int32_t>(kConsumers)) {
      const int32_t token = i / (kGroup / 16);
      const int32_t column = i % (kGroup / 16) * 16;
      const int32_t feature = feature_tile * kGroup + column;
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
        const int32_t feature = feature_tile * kGroup + own_feature() + v * kFeatureStep;
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
    cuda::device::named_barrier_sync(kConsumerBarrier, kConsumers);
    make_scales(tile, feature_tile);
    cuda::device::named_barrier_sync(kConsumerBarrier, kConsumers);
    stage_codes<N>(d);
    cuda::device::named_barrier_sync(kConsumerBarrier, kConsumers);
    store_codes(tile, feature_tile);
  }

  __device__ __forceinline__ void describe_row(RowPair& rows, int i, int64_t index,
                                               int32_t feature) const {
    rows.scale[i] = row_scale(index, feature);
    rows.bias[i] = Base::bias_of(index, feature);
  }

  template <int N>
  __device__ __forceinline__ void run_gated(const TokenTile& tile, int32_t feature_tile) {
    RowPair rows[kSlices];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int32_t own = feature_tile * kGroup + own_feature() + slice * kFeatureStep;
      const int64_t gate = int64_t{tile.expert} * 2 * params.features + own;
      describe_row(rows[slice], 0, gate, own);
      describe_row(rows[slice], 1, gate + params.features, own);
    }
    float d[kSlices][N / 2];
    multiply<N, Side::kUp>(d);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      scale_and_bias<N, Side::kUp>(d[slice], tile, rows[slice]);
      Base::template activate_gated<N>(d[slice]);
    }
    store_intermediate<N>(d, tile, feature_tile);
  }

  // Finishes rows that are the only ones of their tokens.
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

  // Runs down, and up without a gate.
  template <int N, Side kSide>
  __device__ __forceinline__ void run_plain(const TokenTile& tile, int32_t feature_tile) {
    RowPair rows[kSlices];
#pragma unroll
    for (int i = 0; i < 2 * kSlices; ++i) {
      const int32_t own = Base::first_feature(feature_tile, i / 2, 16) + lane / 4 + i % 2 * 8;
      describe_row(rows[i / 2], i % 2, int64_t{tile.expert} * params.features + own, own);
    }
    int32_t slots[(N + 31) / 32];
    Base::template find_slots<N, kSide>(tile, slots);
    float d[kSlices][N / 2];
    multiply<N, kSide>(d);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      scale_and_bias<N, kSide>(d[slice], tile, rows[slice]);
      if constexpr (kSide == Side::kUp) {
        Base::template activate_plain<N>(d[slice]);
      } else {
        finish_rows<N>(d[slice], tile.count, slots);
        Base::template store_plain<N>(d[slice], tile.count,
                                      Base::first_feature(feature_tile, slice, 16), slots);
      }
    }
    if constexpr (kSide == Side::kUp) store_intermediate<N>(d, tile, feature_tile);
  }

  // Tells down that this item of up has been stored.
  __device__ __forceinline__ void count_item(const Item& item) {
    if (params.items_before == 0) return;
    cuda::device::named_barrier_sync(kConsumerBarrier, kConsumers);
    if (threadIdx.x != 0) return;
    __threadfence();
    cuda::device::add_release(&params.tiles[item.tile_index].done, 1);
  }

  template <int N, Side kSide>
  __device__ __forceinline__ void run_tile(const TokenTile& tile, int32_t feature_tile) {
    if constexpr (kPaired && kSide == Side::kUp) {
      run_gated<N>(tile, feature_tile);
    } else {
      run_plain<N, kSide>(tile, feature_tile);
    }
  }
};

}  // namespace conclave::inline v0::experts::stream

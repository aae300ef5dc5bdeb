// The products of bytes. Those of e4m3 are promoted: wgmma's partial sum over 128 columns of K is
// added, times its scales, to float32 sums, since wgmma itself adds e4m3 products with fewer bits.
// Those of int8 stay in wgmma's int32 accumulators, whose sums are exact.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/wgmma.cuh"
#include "experts/cuda/sm90/stream/byte_epilogue.cuh"
#include "experts/cuda/sm90/stream/walk.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::stream {

template <class Config>
struct ByteConsumer : ByteEpilogue<Config> {
  using Base = ByteEpilogue<Config>;
  using Base::Base;
  using Base::kPaired;
  using Base::kSlices;
  using Base::lane;
  using Base::params;
  using Base::release;
  using Base::ring;
  using Base::shared;
  using Base::warp;
  using Element = typename Config::Element;

  template <int N>
  __device__ __forceinline__ void multiply_atom(float (&partial)[N / 2], int atom,
                                                int slice) const {
    const uint64_t a =
        ptx::wgmma_descriptor_128b(ptx::shared_address(shared.weights[ring.slot][atom]) +
                                   (warp / 4 * kSlices + slice) * (64 * Config::kAtomBytes));
    const uint64_t b =
        ptx::wgmma_descriptor_128b(ptx::shared_address(shared.tokens[ring.slot][atom]));
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kAtomBytes / 32; ++k) {
      ptx::Wgmma<Element, N>::mma(partial, a + 2 * k, b + 2 * k, k > 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (float& value : partial) ptx::wgmma_fence_operand(value);
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

  // The scales of the sums' weight rows lane / 4 and lane / 4 + 8: those of gate and of up, or one
  // for all rows of the warpgroup.
  template <Product kProduct>
  __device__ __forceinline__ float2 block_scales(int atom) const {
    if constexpr (!Config::kBlockScales) return {};
    const float* scales = shared.weight_scales[ring.slot][atom];
    if (kProduct == Product::kUp && kPaired) return {scales[0], scales[1]};
    const float scale = scales[kPaired ? warp / 4 : 0];
    return {scale, scale};
  }

  template <int N, Product kProduct>
  __device__ __forceinline__ void multiply(float (&d)[kSlices][N / 2]) {
    if constexpr (Config::kIsInteger) {
      multiply_integers<N, kProduct>(d);
    } else {
      multiply_promoted<N, kProduct>(d);
    }
  }

  template <int N>
  __device__ __forceinline__ void add_stage(int32_t (&sums)[kSlices][N / 2], bool adds) const {
    ptx::wgmma_fence();
#pragma unroll
    for (int atom = 0; atom < Config::kAtoms; ++atom) {
      const uint64_t a =
          ptx::wgmma_descriptor_128b(ptx::shared_address(shared.weights[ring.slot][atom]) +
                                     warp / 4 * (Config::kWeightBytes / Config::kConsumers));
      const uint64_t b =
          ptx::wgmma_descriptor_128b(ptx::shared_address(shared.tokens[ring.slot][atom]));
#pragma unroll
      for (int k = 0; k < Config::kAtomBytes / 32; ++k) {
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
          // Descriptors count in units of 16 bytes: 2 are 32 bytes of K, 512 are 64 rows.
          ptx::Wgmma<Element, N>::mma(sums[slice], a + 2 * k + 512 * slice, b + 2 * k,
                                      adds || atom > 0 || k > 0);
        }
      }
    }
    ptx::wgmma_commit_group();
  }

  // A stage is released when the products of the next one have been issued.
  template <int N, Product kProduct>
  __device__ __forceinline__ void multiply_integers(float (&d)[kSlices][N / 2]) {
    int32_t sums[kSlices][N / 2];
#pragma unroll
    for (int i = 0; i < kSlices * N / 2; ++i) sums[i / (N / 2)][i % (N / 2)] = 0;
    int32_t previous = 0;
    for (int32_t stage = 0; stage < params.depth_stages; ++stage) {
      ptx::mbarrier_wait(&shared.full[ring.slot], ring.phase);
      // cp.async writes through the generic proxy, wgmma reads through the async proxy.
      if constexpr (!kRowsInOrder<Config, kProduct>) ptx::fence_proxy_async_shared();
      add_stage<N>(sums, stage > 0);
      if (stage > 0) {
        ptx::wgmma_wait_group<1>();
        __syncwarp();
        release(previous);
      }
      previous = ring.slot;
      ring.advance();
    }
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < kSlices * N / 2; ++i) {
      int32_t& sum = sums[i / (N / 2)][i % (N / 2)];
      ptx::wgmma_fence_operand(sum);
      d[i / (N / 2)][i % (N / 2)] = static_cast<float>(sum);
    }
    __syncwarp();
    release(previous);
  }

  template <int N, Product kProduct>
  __device__ __forceinline__ void multiply_promoted(float (&d)[kSlices][N / 2]) {
    float partial[N / 2];
#pragma unroll
    for (int i = 0; i < kSlices * N / 2; ++i) d[i / (N / 2)][i % (N / 2)] = 0.0F;
#pragma unroll
    for (float& value : partial) value = 0.0F;
    for (int32_t stage = 0; stage < params.depth_stages; ++stage) {
      ptx::mbarrier_wait(&shared.full[ring.slot], ring.phase);
      // cp.async writes through the generic proxy, wgmma reads through the async proxy.
      if constexpr (!kRowsInOrder<Config, kProduct>) ptx::fence_proxy_async_shared();
#pragma unroll
      for (int atom = 0; atom < Config::kAtoms; ++atom) {
        const float2 scales = block_scales<kProduct>(atom);
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

  template <int N>
  __device__ __forceinline__ void run_gated(const TokenTile& tile, int32_t feature_tile) {
    typename Base::RowPair rows[kSlices];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int32_t own =
          feature_tile * kScaleGroup + Base::own_feature() + slice * Base::kFeatureStep;
      const int64_t gate = int64_t{tile.expert} * 2 * params.features + own;
      Base::describe_row(rows[slice], 0, gate, own);
      Base::describe_row(rows[slice], 1, gate + params.features, own);
    }
    const auto factors = Base::template find_factors<N, Product::kUp>(tile);
    float d[kSlices][N / 2];
    multiply<N, Product::kUp>(d);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      Base::template scale_and_bias<N, Product::kUp>(d[slice], tile, rows[slice], factors);
      Base::template activate<N>(d[slice]);
    }
    Base::template store_intermediate<N>(d, tile, feature_tile);
  }

  // Runs the down product, and the up product without a gate.
  template <int N, Product kProduct>
  __device__ __forceinline__ void run_plain(const TokenTile& tile, int32_t feature_tile) {
    typename Base::RowPair rows[kSlices];
#pragma unroll
    for (int i = 0; i < 2 * kSlices; ++i) {
      const int32_t own = Base::first_feature(feature_tile, i / 2, 16) + lane / 4 + i % 2 * 8;
      Base::describe_row(rows[i / 2], i % 2, int64_t{tile.expert} * params.features + own, own);
    }
    int32_t slots[(N + 31) / 32];
    Base::template find_slots<N, kProduct>(tile, slots);
    const auto factors = Base::template find_factors<N, kProduct>(tile);
    float d[kSlices][N / 2];
    multiply<N, kProduct>(d);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      Base::template scale_and_bias<N, kProduct>(d[slice], tile, rows[slice], factors);
      if constexpr (kProduct == Product::kUp) {
        Base::template activate<N>(d[slice]);
      } else {
        Base::template finish_rows<N>(d[slice], tile.count, slots);
        Base::template store_plain<N>(d[slice], tile.count,
                                      Base::first_feature(feature_tile, slice, 16), slots);
      }
    }
    if constexpr (kProduct == Product::kUp)
      Base::template store_intermediate<N>(d, tile, feature_tile);
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

}  // namespace conclave::inline v0::experts::stream

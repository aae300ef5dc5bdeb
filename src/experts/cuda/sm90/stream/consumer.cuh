// The products of bf16 and f16: sums stay in wgmma's accumulators over all of K.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/wgmma.cuh"
#include "experts/cuda/sm90/stream/epilogue.cuh"

namespace conclave::inline v0::experts::stream {

template <class Config>
struct Consumer : Epilogue<Config> {
  using Base = Epilogue<Config>;
  using Base::Base;
  using Base::kSlices;
  using Base::lane;
  using Base::params;
  using Base::release;
  using Base::ring;
  using Base::shared;
  using Base::warp;
  using Element = typename Config::Element;

  template <int N>
  __device__ __forceinline__ void multiply_atom(float (&d)[kSlices][N / 2], int atom) const {
    const uint64_t a =
        ptx::wgmma_descriptor_128b(ptx::shared_address(shared.weights[ring.slot][atom]) +
                                   warp / 4 * (Config::kWeightBytes / 2));
    const uint64_t b =
        ptx::wgmma_descriptor_128b(ptx::shared_address(shared.tokens[ring.slot][atom]));
#pragma unroll
    for (int k = 0; k < Config::kAtomBytes / 32; ++k) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        // Descriptors count in units of 16 bytes: 2 are 32 bytes of K, 512 are 64 rows.
        ptx::Wgmma<Element, N>::mma(d[slice], a + 2 * k + 512 * slice, b + 2 * k, true);
      }
    }
  }

  // d = the weight rows of this warpgroup, 64 per slice, times N tokens, over all of K.
  template <int N, Product kProduct>
  __device__ __forceinline__ void multiply(float (&d)[kSlices][N / 2]) {
#pragma unroll
    for (int i = 0; i < kSlices * N / 2; ++i) d[i / (N / 2)][i % (N / 2)] = 0.0F;
    int32_t previous = 0;
    for (int32_t stage = 0; stage < params.depth_stages; ++stage) {
      ptx::mbarrier_wait(&shared.full[ring.slot], ring.phase);
      // cp.async writes through the generic proxy, wgmma reads through the async proxy.
      if constexpr (!kRowsInOrder<Config, kProduct>) ptx::fence_proxy_async_shared();
      ptx::wgmma_fence();
#pragma unroll
      for (int atom = 0; atom < Config::kAtoms; ++atom) multiply_atom<N>(d, atom);
      ptx::wgmma_commit_group();
      if (stage > 0) {
        ptx::wgmma_wait_group<1>();
        release(previous);
      }
      previous = ring.slot;
      ring.advance();
    }
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < kSlices * N / 2; ++i) {
      ptx::wgmma_fence_operand(d[i / (N / 2)][i % (N / 2)]);
    }
    release(previous);
  }

  template <int N>
  __device__ __forceinline__ void run_gated(const TokenTile& tile, int32_t feature_tile) {
    float gate_bias[kSlices];
    float up_bias[kSlices];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int32_t own = Base::first_feature(feature_tile, slice, 8) + lane / 4;
      const int64_t gate = int64_t{tile.expert} * 2 * params.features + own;
      gate_bias[slice] = Base::bias_of(gate, own);
      up_bias[slice] = Base::bias_of(gate + params.features, own);
    }
    float d[kSlices][N / 2];
    multiply<N, Product::kUp>(d);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      Base::template weigh_and_bias<N>(d[slice], tile, gate_bias[slice], up_bias[slice]);
      Base::template activate_gated<N>(d[slice]);
      if constexpr (!Config::kWholeLines) {
        Base::template store_gated<N>(d[slice], tile, Base::first_feature(feature_tile, slice, 8));
      }
    }
    if constexpr (Config::kWholeLines) {
      Base::template store_gated_lines<N>(d, tile, Base::first_of_group(feature_tile, 8));
    }
  }

  // Runs the down product, and the up product without a gate.
  template <int N, Product kProduct>
  __device__ __forceinline__ void run_plain(const TokenTile& tile, int32_t feature_tile) {
    float low_bias[kSlices];
    float high_bias[kSlices];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int32_t own = Base::first_feature(feature_tile, slice, 16) + lane / 4;
      const int64_t row = int64_t{tile.expert} * params.features + own;
      low_bias[slice] = Base::bias_of(row, own);
      high_bias[slice] = Base::bias_of(row + 8, own + 8);
    }
    int32_t slots[(N + 31) / 32];
    Base::template find_slots<N, kProduct>(tile, slots);
    float d[kSlices][N / 2];
    multiply<N, kProduct>(d);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if constexpr (kProduct == Product::kUp) {
        Base::template weigh_and_bias<N>(d[slice], tile, low_bias[slice], high_bias[slice]);
        Base::template activate_plain<N>(d[slice]);
      } else {
        Base::template add_bias<N>(d[slice], low_bias[slice], high_bias[slice]);
      }
      if constexpr (!Config::kWholeLines) {
        Base::template store_plain<N>(d[slice], tile.count,
                                      Base::first_feature(feature_tile, slice, 16), slots);
      }
    }
    if constexpr (Config::kWholeLines) {
      Base::template store_plain_lines<N>(d, tile.count, Base::first_of_group(feature_tile, 16),
                                          slots);
    }
  }

  template <int N, Product kProduct>
  __device__ __forceinline__ void run_tile(const TokenTile& tile, int32_t feature_tile) {
    if constexpr (kProduct == Product::kUp) {
      if (params.activation.gated) {
        run_gated<N>(tile, feature_tile);
        return;
      }
    }
    run_plain<N, kProduct>(tile, feature_tile);
  }
};

}  // namespace conclave::inline v0::experts::stream

// The products of a stage. Those of e4m3 are promoted to float32 sums after 128 columns of K, those
// of int8 add up in wgmma's int32 accumulators.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/wgmma.cuh"
#include "experts/cuda/common/ring.cuh"
#include "experts/cuda/sm90/tile_bytes/config.cuh"

namespace conclave::inline v0::experts::tile_bytes {

// sums[i] += part[i], with block scales times those of its token row and of its weight row.
template <class Config>
__device__ __forceinline__ void promote(float (&sums)[64], const float (&part)[64],
                                        const float (&token_scale)[2], float even, float odd) {
  if constexpr (Config::kBlockScales) {
    const float s00 = token_scale[0] * even;
    const float s01 = token_scale[0] * odd;
    const float s10 = token_scale[1] * even;
    const float s11 = token_scale[1] * odd;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float upper = j % 2 == 0 ? s00 : s01;
      const float lower = j % 2 == 0 ? s10 : s11;
      sums[4 * j] = fmaf(part[4 * j], upper, sums[4 * j]);
      sums[4 * j + 1] = fmaf(part[4 * j + 1], upper, sums[4 * j + 1]);
      sums[4 * j + 2] = fmaf(part[4 * j + 2], lower, sums[4 * j + 2]);
      sums[4 * j + 3] = fmaf(part[4 * j + 3], lower, sums[4 * j + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] += part[i];
  }
}

// A consumer warp's view of the ring.
template <class Config>
struct RingView {
  SharedStorage<Config>& shared;
  uint32_t empty_of_peer = 0;
  bool signals = false;  // true in one lane of the warp
  RingPhases phases;

  __device__ __forceinline__ explicit RingView(SharedStorage<Config>& storage) : shared(storage) {
    empty_of_peer = ptx::map_to_block(ptx::shared_address(shared.empty), ptx::cluster_rank() ^ 1);
    signals = threadIdx.x % 32 == 0;
  }
  __device__ __forceinline__ void wait(int32_t stage) const {
    ptx::mbarrier_wait(&shared.full[stage], phases.of(stage));
  }
  // Signals both producers, because each may write weights into this block.
  __device__ __forceinline__ void release(int32_t stage) {
    phases.flip(stage);
    __syncwarp();
    if (signals) {
      ptx::mbarrier_arrive(&shared.empty[stage]);
      ptx::mbarrier_arrive_relaxed(empty_of_peer + stage * 8);
    }
  }
};

template <class Config>
__device__ __forceinline__ void start_chunk(uint32_t tokens, uint32_t weights, float (&part)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) ptx::wgmma_fence_operand(part[i]);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {  // 32 bytes, which are 2 in descriptor units
    ptx::Wgmma<typename Config::Products, 128>::mma(
        part, ptx::wgmma_descriptor_of_low(tokens + 2 * k),
        ptx::wgmma_descriptor_of_low(weights + 2 * k), k > 0);
  }
  ptx::wgmma_commit_group();
#pragma unroll
  for (int i = 0; i < 64; ++i) ptx::wgmma_fence_operand(part[i]);
}
__device__ __forceinline__ void finish_chunk(float (&part)[64]) {
  ptx::wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < 64; ++i) ptx::wgmma_fence_operand(part[i]);
}

// Issues both chunks of a stage.
template <class Config, int kWarpgroup>
__device__ __forceinline__ void add_stage(RingView<Config>& ring, int stage, bool adds,
                                          int32_t (&sums)[2][64]) {
  constexpr int32_t kChunk = 128 * Config::kDepth / 16;
  const uint32_t tokens =
      ptx::wgmma_descriptor_low(ptx::shared_address(ring.shared.tokens[stage])) +
      kWarpgroup * (64 * Config::kDepth / 16);
  const uint32_t weights =
      ptx::wgmma_descriptor_low(ptx::shared_address(ring.shared.weights[stage]));
  ring.wait(stage);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {  // 32 bytes, which are 2 in descriptor units
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      ptx::Wgmma<typename Config::Element, 128>::mma(
          sums[chunk], ptx::wgmma_descriptor_of_low(tokens + 2 * k),
          ptx::wgmma_descriptor_of_low(weights + chunk * kChunk + 2 * k), adds || k > 0);
    }
  }
  ptx::wgmma_commit_group();
}

__device__ __forceinline__ void settle(int32_t (&sums)[2][64]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) ptx::wgmma_fence_operand(sums[i / 64][i % 64]);
}

template <class Config, int kWarpgroup>
__device__ __forceinline__ void multiply_stage(RingView<Config>& ring, int stage,
                                               uint32_t token_scales, float (&sums)[2][64]) {
  constexpr bool kGated = Config::kProduct == Product::kUpGated;
  constexpr int32_t kChunk = 128 * Config::kDepth / 16;
  const uint32_t tokens =
      ptx::wgmma_descriptor_low(ptx::shared_address(ring.shared.tokens[stage])) +
      kWarpgroup * (64 * Config::kDepth / 16);
  const uint32_t weights =
      ptx::wgmma_descriptor_low(ptx::shared_address(ring.shared.weights[stage]));
  float part[64];
  ring.wait(stage);
  start_chunk<Config>(tokens, weights, part);
  float token_scale[2] = {1, 1};
  float weight_scale[2] = {1, 1};
  if constexpr (Config::kBlockScales) {
    const StageInfo& info = ring.shared.info[stage];
    const uint32_t scales = token_scales + static_cast<uint32_t>(stage * sizeof(StageInfo));
    token_scale[0] = ptx::load_shared_f32(scales);
    token_scale[1] = ptx::load_shared_f32(scales + 32);
    if constexpr (!Config::kHasLanes) {
      weight_scale[0] = info.weight_scale[0];
      weight_scale[1] = info.weight_scale[1];
    }
  }
  finish_chunk(part);
  promote<Config>(sums[0], part, token_scale, weight_scale[0], weight_scale[kGated ? 1 : 0]);
  start_chunk<Config>(tokens, weights + kChunk, part);
  finish_chunk(part);
  ring.release(stage);
  promote<Config>(sums[1], part, token_scale, weight_scale[kGated ? 0 : 1], weight_scale[1]);
}

}  // namespace conclave::inline v0::experts::tile_bytes

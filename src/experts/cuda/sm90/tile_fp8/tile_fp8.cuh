// Grouped products of e4m3 codes with many rows per expert, sm_90a.
//
// A block computes 128 token rows x 256 weight rows. Tokens are the M side of wgmma: each of two
// math warpgroups has 64 of them. Weight rows are the N side, in two chunks of 128: the wgmma of a
// chunk fill 64 registers over 128 columns of K, then are promoted into the chunk's 64 float32
// sums, so that 256 weight rows need 192 registers. A gated tile is 128 features: exactly one block
// of weight scales each for gate and up, and one group of the intermediate's scales.
// Two warps of a third warpgroup find tiles and have everything copied: rows are sorted and dense.
// Two blocks form a cluster and take a token tile of up to 256 rows. With more than 128 rows, the
// blocks divide the rows and each loads half of the weights for both, so that L2 feeds 32 KiB per
// stage and block instead of 48. With fewer, both take all rows, and each has other weight rows.
#pragma once

#include "experts/cuda/sm90/tile_fp8/consumer.cuh"
#include "experts/cuda/sm90/tile_fp8/epilogue.cuh"
#include "experts/cuda/sm90/tile_fp8/producer.cuh"

namespace conclave::inline v0::experts::tile_fp8 {

// Where K is a whole number of rounds, every tile begins at stage 0 and the loop over stages is
// unrolled: with constant stages, descriptors stay in uniform registers, and the products of a
// chunk are issued back to back. This is 4 % faster than the other loop.
template <class C, int kWarpgroup>
__device__ __forceinline__ void multiply_tile(RingView<C>& ring, int32_t first, int32_t steps,
                                              uint32_t token_scales, float (&sums)[2][64]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) sums[i / 64][i % 64] = 0;
  if constexpr (C::kWholeRounds) {
    for (int32_t round = 0; round < steps; round += C::kStages) {
#pragma unroll
      for (int stage = 0; stage < C::kStages; ++stage) {
        multiply_stage<C, kWarpgroup>(ring, stage, token_scales, sums);
      }
    }
  } else {
    for (int32_t step = 0; step < steps; ++step) {
      multiply_stage<C, kWarpgroup>(ring, (first + step) % C::kStages, token_scales, sums);
    }
  }
}

// Tells down that this warp has stored its part of a tile of up.
template <class C>
__device__ __forceinline__ void count_tile(const Params& p, const TileView& tile) {
  if (C::kIsDown || !p.hands_over_tiles || tile.count == 0) return;
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  __threadfence();
  dev::add_release(&p.tiles[tile.tile_index].done, 1);
}

template <class C>
__device__ void consume(const Params& p, SharedStorage<C>& s) {
  // The shuffle tells the compiler that the value is the same in a whole warp.
  const int32_t warpgroup = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x) / 128, 0);
  const int32_t steps = (p.depth + C::kDepth - 1) / C::kDepth;
  RingView<C> ring(s);
  int32_t first = 0;
  for (;; first = (first + steps) % C::kStages) {
    ring.wait(first);
    const TileView tile = s.info[first].tile;
    if (tile.expert < 0) return;
    if (warpgroup * 64 >= tile.count) {  // no row of this tile is in this half
      for (int32_t step = 0; step < steps; ++step) {
        const int32_t stage = (first + step) % C::kStages;
        ring.wait(stage);
        ring.release(stage);
      }
      count_tile<C>(p, tile);
      continue;
    }
    const int32_t row = row_of_thread();
    const SlotsOfThread slots = slots_of_thread<C>(p, tile, row);
    float sums[2][64];
    const uint32_t token_scales = dev::shared_address(&s.info[0].token_scale[tile.begin % 4 + row]);
    if (warpgroup == 0) {
      multiply_tile<C, 0>(ring, first, steps, token_scales, sums);
    } else {
      multiply_tile<C, 1>(ring, first, steps, token_scales, sums);
    }
    finish_tile<C>(p, tile, slots, s.scratch, sums);
    count_tile<C>(p, tile);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    tile_fp8_kernel(const __grid_constant__ CUtensorMap token_map,
                    const __grid_constant__ CUtensorMap weight_map,
                    const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& s = *reinterpret_cast<SharedStorage<C>*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      dev::mbarrier_init(&s.full[i], 1);
      dev::mbarrier_init(&s.empty[i], C::kCluster * C::kMathThreads / 32);
    }
    for (uint64_t& full : s.ticket_full) dev::mbarrier_init(&full, 1);
    dev::mbarrier_init(&s.next_full, 1);
    dev::mbarrier_init(&s.next_empty, 1);
    dev::fence_mbarrier_init();
    dev::prefetch_tensor_map(&weight_map);
    dev::prefetch_tensor_map(&token_map);
  }
  dev::cluster_sync();
  if (threadIdx.x >= C::kMathThreads) {
    dev::setmaxnreg_dec<C::kLoadRegisters>();
    const int32_t warp = (static_cast<int32_t>(threadIdx.x) - C::kMathThreads) / 32;
    if (warp == 0) load_tiles<C>(p, &token_map, &weight_map, s);
    if (warp == 1) find_tiles<C>(p, s);
  } else {
    dev::setmaxnreg_inc<C::kMathRegisters>();
    if (!awaits_tiles<C>(p)) dev::grid_dependency_wait();
    consume<C>(p, s);
  }
  // The other block may still arrive at barriers of this one.
  __syncwarp();
  dev::cluster_sync();
}

}  // namespace conclave::inline v0::experts::tile_fp8

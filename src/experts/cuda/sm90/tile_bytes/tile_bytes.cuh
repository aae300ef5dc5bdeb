// Grouped products of codes of a byte, e4m3 or int8, with many rows per expert, sm_90a.
//
// A block computes 128 token rows x 256 weight rows. Tokens are the M side of wgmma: each of two
// consumer warpgroups has 64 of them. Weight rows are the N side, in two chunks of 128: the wgmma
// of a chunk of e4m3 fill 64 registers over 128 columns of K, then are promoted into the chunk's 64
// float32 sums, so that 256 weight rows need 192 registers; those of int8 need no others than sums.
// A gated item is 128 features: exactly one block of weight scales each for gate and up, and one
// group of the intermediate's scales. Two warps of a third warpgroup find items and have everything
// copied: rows are sorted and dense. Two blocks form a cluster and take a token tile of up to 256
// rows. With more than 128 rows, the blocks divide the rows and each loads half of the weights for
// both, so that L2 feeds 32 KiB per stage and block instead of 48. With fewer, both take all rows,
// and each has other weight rows. Weights that are codes of 4 bits come by way of a fourth
// warpgroup, which decodes them: see decoder.cuh.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/tma.cuh"
#include "experts/cuda/sm90/tile_bytes/consumer.cuh"
#include "experts/cuda/sm90/tile_bytes/epilogue.cuh"
#include "experts/cuda/sm90/tile_bytes/factors.cuh"
#include "experts/cuda/sm90/tile_bytes/producer.cuh"
#include "experts/cuda/sm90/tile_bytes/walk.cuh"

namespace conclave::inline v0::experts::tile_bytes {

// Calls visit(stage, step) for all steps of an item. Where K is a whole number of rounds, every
// item begins at stage 0 and the loop over stages is unrolled: with constant stages, descriptors
// stay in uniform registers, and the products of a chunk are issued back to back. This is 4 %
// faster than the other loop.
template <class Config, class Visit>
__device__ __forceinline__ void for_each_stage(int32_t first, int32_t steps, const Visit& visit) {
  if constexpr (Config::kWholeRounds) {
    for (int32_t round = 0; round < steps; round += Config::kStages) {
#pragma unroll
      for (int stage = 0; stage < Config::kStages; ++stage) visit(stage, round + stage);
    }
  } else {
    for (int32_t step = 0; step < steps; ++step) visit((first + step) % Config::kStages, step);
  }
}

template <class Config, int kWarpgroup>
__device__ __forceinline__ void multiply_promoted(RingView<Config>& ring, int32_t first,
                                                  int32_t steps, uint32_t token_scales,
                                                  float (&sums)[2][64]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) sums[i / 64][i % 64] = 0;
  for_each_stage<Config>(first, steps, [&](int stage, int32_t) {
    multiply_stage<Config, kWarpgroup>(ring, stage, token_scales, sums);
  });
}

// A stage is released when the products of the next one have been issued.
template <class Config, int kWarpgroup>
__device__ __forceinline__ void multiply_integers(RingView<Config>& ring, int32_t first,
                                                  int32_t steps, float (&sums)[2][64]) {
  int32_t whole[2][64];
#pragma unroll
  for (int i = 0; i < 128; ++i) whole[i / 64][i % 64] = 0;
  settle(whole);
  for_each_stage<Config>(first, steps, [&](int stage, int32_t step) {
    add_stage<Config, kWarpgroup>(ring, stage, step > 0, whole);
    if (step == 0) return;
    ptx::wgmma_wait_group<1>();
    ring.release((stage + Config::kStages - 1) % Config::kStages);
  });
  ptx::wgmma_wait_group<0>();
  settle(whole);
  ring.release((first + steps - 1) % Config::kStages);
#pragma unroll
  for (int i = 0; i < 128; ++i) sums[i / 64][i % 64] = static_cast<float>(whole[i / 64][i % 64]);
}

template <class Config, int kWarpgroup>
__device__ __forceinline__ void multiply_item(RingView<Config>& ring, int32_t first, int32_t steps,
                                              uint32_t token_scales, float (&sums)[2][64]) {
  if constexpr (Config::kIsInteger) {
    multiply_integers<Config, kWarpgroup>(ring, first, steps, sums);
  } else {
    multiply_promoted<Config, kWarpgroup>(ring, first, steps, token_scales, sums);
  }
}

// Counts for the down product that this warp has stored its part of an item of the up product.
template <class Config>
__device__ __forceinline__ void count_item(const Params& params, const Item& item) {
  if (Config::kIsDown || !params.hands_over_tiles || item.count == 0) return;
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  __threadfence();
  ptx::add_release(&params.tiles[item.tile_index].done, 1);
}

template <class Config>
__device__ void consume(const Params& params, SharedStorage<Config>& shared) {
  // The shuffle tells the compiler that the value is the same in a whole warp.
  const int32_t warpgroup = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x) / 128, 0);
  const int32_t steps = (params.depth + Config::kDepth - 1) / Config::kDepth;
  RingView<Config> ring(shared);
  const ItemFactors<Config> factors(params, shared.factors[warpgroup], warpgroup);
  int32_t first = 0;
  for (;; first = (first + steps) % Config::kStages) {
    ring.wait(first);
    const Item item = shared.info[first].item;
    if (item.expert < 0) return;
    if (warpgroup * 64 >= item.count) {  // no row of this item is in this half
      for (int32_t step = 0; step < steps; ++step) {
        const int32_t stage = (first + step) % Config::kStages;
        ring.wait(stage);
        ring.release(stage);
      }
      count_item<Config>(params, item);
      continue;
    }
    const int32_t row = row_of_thread();
    const SlotsOfThread slots = slots_of_thread<Config>(params, item, row);
    factors.fetch(item);
    float sums[2][64];
    const uint32_t token_scales =
        ptx::shared_address(&shared.info[0].token_scale[item.begin % 4 + row]);
    if (warpgroup == 0) {
      multiply_item<Config, 0>(ring, first, steps, token_scales, sums);
    } else {
      multiply_item<Config, 1>(ring, first, steps, token_scales, sums);
    }
    finish_item<Config>(params, item, factors, slots, shared.scratch, sums);
    count_item<Config>(params, item);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    tile_bytes_product(const __grid_constant__ CUtensorMap token_map,
                       const __grid_constant__ CUtensorMap weight_map,
                       const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], Config::kFillers);
      ptx::mbarrier_init(&shared.empty[i], Config::kCluster * Config::kConsumerThreads / 32);
    }
    if constexpr (Config::kHasLanes) {
      for (int i = 0; i < CodeRing::kSlots; ++i) {
        ptx::mbarrier_init(&shared.lanes.full[i], 1);
        ptx::mbarrier_init(&shared.lanes.empty[i], Config::kDecoderThreads / 32);
      }
    }
    for (uint64_t& full : shared.ticket_full) ptx::mbarrier_init(&full, 1);
    ptx::mbarrier_init(&shared.item_full, 1);
    ptx::mbarrier_init(&shared.item_empty, Config::kHasLanes ? 2 : 1);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&weight_map);
    ptx::prefetch_tensor_map(&token_map);
  }
  ptx::cluster_sync();
  constexpr int kFirstDecoder = Config::kConsumerThreads + Config::kProducerThreads;
  if (Config::kHasLanes && threadIdx.x >= kFirstDecoder) {
    if constexpr (Config::kHasLanes) {
      ptx::setmaxnreg_dec<Config::kDecoderRegisters>();
      decode_weights<Config>(shared);
    }
  } else if (threadIdx.x >= Config::kConsumerThreads) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    const int32_t warp = (static_cast<int32_t>(threadIdx.x) - Config::kConsumerThreads) / 32;
    if (warp == 0) produce<Config>(params, &token_map, &weight_map, shared);
    if (warp == 1) tell_items<Config>(params, shared);
    if constexpr (Config::kHasLanes) {
      if (warp == 2 && threadIdx.x % 32 == 0) produce_codes<Config>(params, &weight_map, shared);
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    if (!awaits_rows<Config>(params)) ptx::grid_dependency_wait();
    consume<Config>(params, shared);
  }
  // The other block may still arrive at barriers of this one.
  __syncwarp();
  ptx::cluster_sync();
}

}  // namespace conclave::inline v0::experts::tile_bytes

// A block of a product whose rows may have adapters.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/tma.cuh"
#include "experts/cuda/sm90/stream/adapted_consumer.cuh"
#include "experts/cuda/sm90/stream/stream.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::stream {

// The up product comes behind the launch of its terms, which has waited for all that the ring is
// filled with: only consumers wait for the terms. The launch behind this one, of the down product's
// terms, may begin at once too, since it relies on the grouping alone being done.
template <class Config>
__device__ __forceinline__ void produce_beside_terms(const Params& params,
                                                     SharedStorage<Config>& shared) {
  constexpr Product kProduct = Product::kUp;
  if (Config::kIsByte && blockIdx.x == 0) {
    // Those of the forward before were read by launches that have ended.
    *params.hand_over = HandOver();
    __threadfence();
  }
  ptx::grid_launch_dependents();
  const Walk<Config> walk(params);
  RingPosition<Config::kStages> ring;
  auto index = static_cast<int32_t>(blockIdx.x);
  for (; index < walk.items; index += static_cast<int32_t>(gridDim.x)) {
    const Item item = walk.at(index);
    for (int32_t first = 0; first < params.depth_stages; first += Config::kBurst) {
      const int32_t end = min(first + Config::kBurst, params.depth_stages);
      claim_stages(shared, ring, 0, end - first);
      for (int32_t stage = first; stage < end; ++stage) {
        expect_stage<Config, kProduct>(params, shared, ring.slot, item.tile.count);
        load_weights<Config, kProduct>(params, shared, ring.slot, item.tile.expert,
                                       item.feature_tile, stage);
        ring.advance();
      }
    }
  }
}

// Rows of bytes have scales, which are read by way of L1 and so behind the wait.
template <class Config>
__device__ __forceinline__ void gather_beside_terms(const Params& params,
                                                    SharedStorage<Config>& shared, int32_t warp) {
  constexpr Product kProduct = Product::kUp;
  if constexpr (Config::kIsByte) return gather<Config, kProduct>(params, shared, warp);
  int32_t* const source_rows = shared.source_rows[warp];
  const Walk<Config> walk(params);
  RingPosition<Config::kStages> ring;
  auto index = static_cast<int32_t>(blockIdx.x);
  Item next = walk.at(index);
  for (; index < walk.items; index += static_cast<int32_t>(gridDim.x)) {
    const TokenTile tile = next.tile;
    next = walk.at(index + static_cast<int32_t>(gridDim.x));
    find_source_rows<Config>(params, source_rows, tile);
    for (int32_t stage = 0; stage < params.depth_stages; ++stage) {
      ptx::mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
      gather_stage<Config, kProduct>(params, source_rows, shared, ring.slot, tile, nullptr, stage,
                                     warp);
      ring.advance();
    }
  }
  ptx::cp_async_wait_group<0>();
}

template <class Config, Product kProduct, class Consumer>
__device__ __forceinline__ void run_adapted_block(const Params& params,
                                                  SharedStorage<Config>& shared) {
  static_assert(!Config::kSorted && !Config::kHasTokenRing);
  prepare<Config, kProduct>(params, shared);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  if (warp < Config::kConsumerWarps) {
    if constexpr (Config::kMovesRegisters) {
      ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    }
    if constexpr (kDraws<Config, kProduct>) {
      consume_drawn<Config, kProduct, Consumer>(params, shared);
    } else {
      consume<Config, kProduct, Consumer>(params, shared);
    }
    return;
  }
  if constexpr (Config::kMovesRegisters) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
  }
  const int32_t helper = warp - Config::kConsumerWarps - 1;
  if (helper < 0) {
    if (!ptx::elect_one()) return;
    if constexpr (kProduct == Product::kUp) {
      produce_beside_terms<Config>(params, shared);
    } else if constexpr (kDraws<Config, kProduct>) {
      produce_drawn(params, shared);
    } else {
      produce<Config, kProduct>(params, shared);
    }
  } else if constexpr (kProduct == Product::kUp) {
    gather_beside_terms<Config>(params, shared, helper);
  } else if (helper < gather_warps<Config, kProduct>()) {
    gather<Config, kProduct>(params, shared, helper);
  }
}

}  // namespace conclave::inline v0::experts::stream

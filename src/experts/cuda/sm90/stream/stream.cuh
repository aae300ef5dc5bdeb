// Products that read their weights from memory once, for few rows per expert: weights are the M
// side of wgmma, tokens the N side. The up product gathers its rows and applies the activation, the
// down product writes one row per slot. An element is summed over K in the same order whatever the
// tile.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/tma.cuh"
#include "experts/cuda/sm90/stream/consumer.cuh"
#include "experts/cuda/sm90/stream/drawn_producer.cuh"
#include "experts/cuda/sm90/stream/producer.cuh"
#include "experts/cuda/sm90/stream/walk.cuh"

namespace conclave::inline v0::experts::stream {

// Computes the block's items as the producer draws and tells them.
template <class Config, Product kProduct, class Consumer>
__device__ __forceinline__ void consume_drawn(const Params& params, SharedStorage<Config>& shared) {
  Consumer consumer(params, shared);
  uint32_t order = 0;
  for (Item item = await_item(shared, order); item.tile.count > 0;
       item = await_item(shared, ++order)) {
    consumer.template run_item<kProduct>(item);
    if constexpr (kProduct == Product::kUp) consumer.count_item(item);
  }
}

// Computes the block's items in fixed turns, as the producers load them.
template <class Config, Product kProduct, class Consumer>
__device__ __forceinline__ void consume(const Params& params, SharedStorage<Config>& shared) {
  Consumer consumer(params, shared);
  // The down product may read the tiles before it waits: it begins when every block of the up
  // product has waited for the grouping.
  if (kProduct == Product::kUp && !params.groups_are_done) ptx::grid_dependency_wait();
  const Walk<Config> walk(params);
  auto index = static_cast<int32_t>(blockIdx.x);
  Item item = walk.at(index);
  ptx::grid_dependency_wait();
  while (index < walk.items) {
    index += static_cast<int32_t>(gridDim.x);
    const Item next = walk.at(index);
    consumer.template run_item<kProduct>(item);
    if constexpr (kProduct == Product::kUp && Config::kIsByte) consumer.count_item(item);
    item = next;
  }
}

template <class Config, Product kProduct>
__device__ __forceinline__ void prepare(const Params& params, SharedStorage<Config>& shared) {
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&params.weights);
    if constexpr (kRowsInOrder<Config, kProduct>) ptx::prefetch_tensor_map(&params.rows);
    for (int32_t stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], 1 + 32 * gather_warps<Config, kProduct>());
      ptx::mbarrier_init(&shared.empty[stage], Config::kConsumerWarps);
    }
    for (uint64_t& full : shared.item_full) ptx::mbarrier_init(&full, 1);
    for (uint64_t& full : shared.tokens_full) ptx::mbarrier_init(&full, 1);
    for (uint64_t& empty : shared.tokens_empty) ptx::mbarrier_init(&empty, Config::kConsumerWarps);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
}

template <class Config, Product kProduct, class Consumer>
__device__ __forceinline__ void run_block(const Params& params, SharedStorage<Config>& shared) {
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
    if constexpr (kDraws<Config, kProduct>) {
      if constexpr (kProduct == Product::kUp) {
        produce_drawn_up(params, shared);
      } else {
        produce_drawn(params, shared);
      }
    } else {
      produce<Config, kProduct>(params, shared);
    }
  } else if constexpr (Config::kHasTokenRing) {
    if (helper == 0 && ptx::elect_one()) produce_rows<Config>(params, shared);
  } else if (helper < gather_warps<Config, kProduct>()) {
    gather<Config, kProduct>(params, shared, helper);
  }
}

template <class Config, Product kProduct>
__global__ void __launch_bounds__(Config::kThreads, 1)
    stream_product(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  run_block<Config, kProduct, Consumer<Config>>(params,
                                                *reinterpret_cast<SharedStorage<Config>*>(bytes));
}

}  // namespace conclave::inline v0::experts::stream

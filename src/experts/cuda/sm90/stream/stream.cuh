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

// Computes the block's items as they are drawn.
template <class Config, Product kProduct, class Consumer>
__device__ __forceinline__ void consume(const Params& params, SharedStorage<Config>& shared) {
  Consumer consumer(params, shared);
  uint32_t order = 0;
  for (Item item = await_item(shared, order); item.tile.count > 0;
       item = await_item(shared, ++order)) {
    consumer.template run_item<kProduct>(item);
    // Read anew, since registers of those that multiply are few.
    if constexpr (kProduct == Product::kUp) consumer.count_item(told_item(shared, order));
  }
}

// Runs the thread that draws items.
template <class Config, Product kProduct>
__device__ __forceinline__ void produce(const Params& params, SharedStorage<Config>& shared) {
  if constexpr (kProduct == Product::kUp) {
    produce_up(params, shared);
  } else {
    produce_down(params, shared);
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
    consume<Config, kProduct, Consumer>(params, shared);
    return;
  }
  if constexpr (Config::kMovesRegisters) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
  }
  const int32_t helper = warp - Config::kConsumerWarps - 1;
  if (helper < 0) {
    if (ptx::elect_one()) produce<Config, kProduct>(params, shared);
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

// Products that read their weights from memory once, for few rows per expert: weights are the M
// side of wgmma, tokens the N side. Up gathers its rows and applies the activation, down writes one
// row per slot. The sum over K of an element has one order, whatever the tile.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/tma.cuh"
#include "experts/cuda/sm90/stream/config.cuh"
#include "experts/cuda/sm90/stream/consumer.cuh"
#include "experts/cuda/sm90/stream/producer.cuh"

namespace conclave::inline v0::experts::stream {

// Runs a tile on the narrowest product that holds its rows.
template <class Config, Side kSide, int kWidth, class Consumer>
__device__ __forceinline__ void run_narrowest(Consumer& consumer, const Item& item) {
  constexpr Widths kWidths = Config::kWidths;
  if constexpr (kWidth + 1 < kWidths.count) {
    if (item.tile.count > kWidths.of[kWidth]) {
      run_narrowest<Config, kSide, kWidth + 1>(consumer, item);
      return;
    }
  }
  consumer.template run_tile<kWidths.of[kWidth], kSide>(item.tile, item.feature_tile);
}

// Computes the block's items as the producer tells them.
template <class Config, Side kSide, class Consumer>
__device__ __forceinline__ void consume_drawn(const Params& params, SharedStorage<Config>& shared) {
  Consumer consumer(params, shared);
  uint32_t order = 0;
  for (Item item = await_item(shared, order); item.tile.count > 0;
       item = await_item(shared, ++order)) {
    run_narrowest<Config, kSide, 0>(consumer, item);
  }
}

// Computes the block's tiles in the order in which the producers load them.
template <class Config, Side kSide, class Consumer>
__device__ __forceinline__ void consume(const Params& params, SharedStorage<Config>& shared) {
  Consumer consumer(params, shared);
  // Down may read the tiles before it waits: it begins when every block of up has waited for the
  // grouping.
  if (kSide == Side::kUp && !params.groups_are_done) cuda::device::grid_dependency_wait();
  const Walk<Config> walk(params);
  auto index = static_cast<int32_t>(blockIdx.x);
  Item item = walk.at(index);
  cuda::device::grid_dependency_wait();
  while (index < walk.items) {
    index += static_cast<int32_t>(gridDim.x);
    const Item next = walk.at(index);
    run_narrowest<Config, kSide, 0>(consumer, item);
    if constexpr (kSide == Side::kUp && Config::kIsFp8) consumer.count_item(item);
    item = next;
  }
}

template <class Config, Side kSide>
__device__ __forceinline__ void prepare(const Params& params, SharedStorage<Config>& shared) {
  if (threadIdx.x == 0) {
    cuda::device::prefetch_tensor_map(&params.weights);
    if constexpr (kRowsInOrder<Config, kSide>) cuda::device::prefetch_tensor_map(&params.rows);
    for (int32_t stage = 0; stage < Config::kStages; ++stage) {
      cuda::device::mbarrier_init(&shared.full[stage], 1 + 32 * gather_warps<Config, kSide>());
      cuda::device::mbarrier_init(&shared.empty[stage], Config::kConsumerWarps);
    }
    for (uint64_t& full : shared.item_full) cuda::device::mbarrier_init(&full, 1);
    cuda::device::fence_mbarrier_init();
  }
  __syncthreads();
}

template <class Config, Side kSide, class Consumer>
__device__ __forceinline__ void run_block(const Params& params, SharedStorage<Config>& shared) {
  prepare<Config, kSide>(params, shared);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  if (warp < Config::kConsumerWarps) {
    if constexpr (Config::kMovesRegisters) {
      cuda::device::setmaxnreg_inc<Config::kConsumerRegisters>();
    }
    if constexpr (kDraws<Config, kSide>) {
      consume_drawn<Config, kSide, Consumer>(params, shared);
    } else {
      consume<Config, kSide, Consumer>(params, shared);
    }
    return;
  }
  if constexpr (Config::kMovesRegisters) {
    cuda::device::setmaxnreg_dec<Config::kProducerRegisters>();
  }
  const int32_t helper = warp - Config::kConsumerWarps - 1;
  if (helper < 0) {
    if (!cuda::device::elect_one()) return;
    if constexpr (kDraws<Config, kSide>) {
      produce_drawn(params, shared);
    } else {
      produce<Config, kSide>(params, shared);
    }
  } else if (helper < gather_warps<Config, kSide>()) {
    gather<Config, kSide>(params, shared, helper);
  }
}

template <class Config, Side kSide>
__global__ void __launch_bounds__(Config::kThreads, 1)
    stream_product(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  run_block<Config, kSide, Consumer<Config>>(params,
                                             *reinterpret_cast<SharedStorage<Config>*>(bytes));
}

}  // namespace conclave::inline v0::experts::stream

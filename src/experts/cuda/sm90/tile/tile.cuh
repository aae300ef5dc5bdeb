// Grouped products for many rows per expert: tokens are the M side of wgmma, weights the N side.
//
// A block is persistent: warpgroup 0 loads, each of the others multiplies 64 of an item's rows. An
// item is `kTokens` sorted rows of one expert times `kFeatures` weight rows. Items differ in cost,
// since a warpgroup without rows multiplies nothing, and so blocks draw them from a counter.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/tma.cuh"
#include "experts/cuda/sm90/tile/consumer.cuh"
#include "experts/cuda/sm90/tile/epilogue.cuh"
#include "experts/cuda/sm90/tile/producer.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::tile {

template <class Config>
__device__ __forceinline__ void store_all(const Params& params, const uint8_t* staging,
                                          Results<Config>& results) {
  store_results<Config, 0, Config::kPasses>(params, staging, results);
  results.target.rows = 0;
}

// The state that a consumer warp keeps from item to item.
template <class Config>
struct Consumer {
  const Params& params;
  ItemReader<Config>& items;
  Multiplier<Config>& multiplier;
  Results<Config>& results;
  const uint8_t* staging;
  int32_t warp_row;
  int32_t num_stages;

  // Multiplies kSums * 2 features. During the first stages, the next item is asked for and the
  // results of the previous one are stored.
  template <int kSums>
  __device__ __forceinline__ Item multiply(const Item& item) const {
    float sums[kSums];  // for this item only: nothing else may define wgmma's registers
    multiplier.start(true, sums);
    const Item following = items.next();
    const RowTarget target = find_target<Config>(params, item, warp_row);
    store_results<Config, 0, Config::kFirstPasses>(params, staging, results);
    multiplier.follow(sums);
    store_results<Config, Config::kFirstPasses, Config::kPasses>(params, staging, results);
    for (int32_t i = 2; i < num_stages; ++i) multiplier.follow(sums);
    multiplier.finish();
    finish_sums<Config>(params, target, item.first_feature, sums, results);
    return following;
  }
};

template <class Config>
__device__ __forceinline__ void consume(const Params& params, SharedStorage<Config>& shared) {
  const auto consumer_warp = static_cast<int32_t>(threadIdx.x / 32) - 4;
  const int32_t first_row = consumer_warp / 4 * 64;
  const int32_t num_stages = stages_of_item<Config>(params);
  const uint8_t* staging = shared.staging[consumer_warp];
  Multiplier<Config> multiplier(shared, first_row);
  const Walk<Config> walk(params);
  ItemReader<Config> items{walk, shared, false};
  Results<Config> results;
  const Consumer<Config> consumer{
      params, items, multiplier, results, staging, first_row + consumer_warp % 4 * 16, num_stages};
  Item item = items.first();
  while (item.valid) {
    if (item.tile.count <= first_row) {
      const Item following = items.next();
      store_all<Config>(params, staging, results);
      pass_by<Config>(shared, num_stages, multiplier.ring);
      item = following;
    } else if (!item.half) {
      item = consumer.template multiply<Config::kAccumulators>(item);
    } else if constexpr (Config::kHalves) {
      item = consumer.template multiply<Config::kAccumulators / 2>(item);
    }
  }
  store_all<Config>(params, staging, results);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    tile_product(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(raw_shared);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&params.weights);
    if constexpr (!Config::kGathers) ptx::prefetch_tensor_map(&params.rows);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], Config::kFills);
      ptx::mbarrier_init(&shared.empty[stage], Config::kReleases);
    }
    for (int item = 0; item < Config::kItems; ++item) {
      ptx::mbarrier_init(&shared.item_full[item], 1);
      ptx::mbarrier_init(&shared.item_empty[item], Config::kItemReaders);
    }
    ptx::fence_mbarrier_init();
  }
  if constexpr (Config::kCluster > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if constexpr (Config::kGathers) {
      const auto thread = static_cast<int32_t>(threadIdx.x);
      GatherProducer<Config>{params, shared, thread / 8, thread % 8}.run();
    } else if (threadIdx.x == 0) {
      ptx::fence_proxy_async();  // rows were stored through the generic proxy
      produce_sorted<Config>(params, shared);
    } else if (threadIdx.x == 32 && tells_items<Config>()) {
      tell_items<Config>(params, shared);
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    consume<Config>(params, shared);
  }
  // The other block may still signal this one's barriers.
  if constexpr (Config::kCluster > 1) {
    __syncwarp();
    ptx::cluster_sync();
  }
}

}  // namespace conclave::inline v0::experts::tile

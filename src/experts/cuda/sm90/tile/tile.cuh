// Grouped products for many rows per expert: tokens are the M side of wgmma, weights the N side.
//
// A block is persistent: warpgroup 0 loads, the others multiply 64 of a tile's rows each.
// A tile is `kTokens` sorted rows of one expert times `kFeatures` weight rows. Tiles differ in
// cost (a warpgroup without rows multiplies nothing), so blocks draw them from a queue.
#pragma once

#include "experts/cuda/sm90/tile/consumer.cuh"
#include "experts/cuda/sm90/tile/epilogue.cuh"
#include "experts/cuda/sm90/tile/producer.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::tile_sm90 {

template <class Config>
__device__ __forceinline__ void store_all(const Params& params, const uint8_t* staging,
                                          Results<Config>& results) {
  store_results<Config, 0, Config::kPasses>(params, staging, results);
  results.target.rows = 0;
}

// State that a consumer warp keeps from tile to tile.
template <class Config>
struct Consumer {
  const Params& params;
  OrderReader<Config>& orders;
  Multiplier<Config>& multiplier;
  Results<Config>& results;
  const uint8_t* staging;
  int32_t warp_row;
  int32_t num_stages;

  // Computes a product of kSums * 2 features. During its first stages, the next tile is requested
  // and the results of the previous one are stored.
  template <int kSums>
  __device__ __forceinline__ Work multiply(const Work& work) const {
    float sums[kSums];  // for this tile only: nothing else may define wgmma's registers
    multiplier.start(true, sums);
    const Work following = orders.next();
    const RowTarget target = find_target<Config>(params, work, warp_row);
    store_results<Config, 0, Config::kFirstPasses>(params, staging, results);
    multiplier.follow(sums);
    store_results<Config, Config::kFirstPasses, Config::kPasses>(params, staging, results);
    for (int32_t i = 2; i < num_stages; ++i) multiplier.follow(sums);
    multiplier.finish();
    finish_sums<Config>(params, target, work.first_feature, sums, results);
    return following;
  }
};

template <class Config>
__device__ __forceinline__ void consume(const Params& params, SharedStorage<Config>& shared) {
  const auto consumer_warp = static_cast<int32_t>(threadIdx.x / 32) - 4;
  const int32_t first_row = consumer_warp / 4 * 64;
  const int32_t num_stages = stages_of_tile<Config>(params);
  const uint8_t* staging = shared.staging[consumer_warp];
  Multiplier<Config> multiplier(shared, first_row);
  const TileWalk<Config> walk(params);
  OrderReader<Config> orders{walk, shared, false};
  Results<Config> results;
  const Consumer<Config> consumer{
      params, orders, multiplier, results, staging, first_row + consumer_warp % 4 * 16, num_stages};
  Work work = orders.first();
  while (work.valid) {
    if (work.tile.count <= first_row) {
      const Work following = orders.next();
      store_all<Config>(params, staging, results);
      pass_by<Config>(shared, num_stages, multiplier.position);
      work = following;
    } else if (!work.half) {
      work = consumer.template multiply<Config::kAccumulators>(work);
    } else if constexpr (Config::kHalves) {
      work = consumer.template multiply<Config::kAccumulators / 2>(work);
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
    prefetch_tensor_map(&params.weights);
    if constexpr (!Config::kGathers) prefetch_tensor_map(&params.rows);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      mbarrier_init(&shared.full[stage], Config::kFills);
      mbarrier_init(&shared.empty[stage], Config::kReleases);
    }
    for (int order = 0; order < Config::kOrders; ++order) {
      mbarrier_init(&shared.order_full[order], 1);
      mbarrier_init(&shared.order_empty[order], Config::kOrderReaders);
    }
    fence_mbarrier_init();
  }
  if constexpr (Config::kCluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  grid_dependency_wait();
  grid_launch_dependents();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if constexpr (Config::kGathers) {
      const auto thread = static_cast<int32_t>(threadIdx.x);
      GatherProducer<Config>{params, shared, thread / 8, thread % 8}.run();
    } else if (threadIdx.x == 0) {
      fence_proxy_async();  // rows were stored through the generic proxy
      produce_sorted<Config>(params, shared);
    } else if (threadIdx.x == 32 && gives_orders<Config>()) {
      give_orders<Config>(params, shared);
    }
  } else {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    consume<Config>(params, shared);
  }
  // The other block may still signal this one's barriers.
  if constexpr (Config::kCluster > 1) {
    __syncwarp();
    cluster_sync();
  }
}

}  // namespace conclave::inline v0::experts::tile_sm90

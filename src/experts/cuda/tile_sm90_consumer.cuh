// Products of tile_sm90: 64 rows of a tile by a warpgroup.
#pragma once

#include "cuda/device/wgmma.cuh"
#include "experts/cuda/tile_sm90_config.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::tile_sm90 {

template <class Config>
__device__ __forceinline__ void release(SharedStorage<Config>& shared, int32_t stage) {
  const uint32_t lane = threadIdx.x % 32;
  if constexpr (Config::kCluster == 1) {
    if (lane == 0) mbarrier_arrive(&shared.empty[stage]);
  } else {
    if (lane < Config::kCluster) mbarrier_arrive_cluster(&shared.empty[stage], lane);
  }
}

// The product of 64 rows. One group of wgmma stays in flight; the stage before it
// goes back to the producer.
template <class Config>
__device__ __forceinline__ void multiply(SharedStorage<Config>& shared, int32_t first_row,
                                         int32_t num_stages,
                                         RingPosition<Config::kStages>& position,
                                         float (&sums)[Config::kAccumulators]) {
  const uint64_t tokens =
      wgmma_descriptor_128b(shared_address(shared.tokens[0]) + first_row * Config::kRowBytes);
  const uint64_t features = wgmma_descriptor_128b(shared_address(shared.features[0]));
  int32_t previous = 0;
  for (int32_t i = 0; i < num_stages; ++i) {
    mbarrier_wait(&shared.full[position.stage], position.phase);
    // cp.async writes as ordinary stores do; wgmma reads as the copy engine does.
    if constexpr (Config::kGathers) fence_proxy_async_shared();
    const uint64_t a = tokens + static_cast<uint32_t>(position.stage * (Config::kTokenBytes / 16));
    const uint64_t b =
        features + static_cast<uint32_t>(position.stage * (Config::kFeatureBytes / 16));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Wgmma<typename Config::Element, Config::kFeatures>::mma(sums, a + step * 2, b + step * 2,
                                                              step > 0 || i > 0);
    }
    wgmma_commit_group();
    wgmma_wait_group<1>();
    if (i > 0) release<Config>(shared, previous);
    previous = position.stage;
    position.advance();
  }
  wgmma_wait_group<0>();
  release<Config>(shared, previous);
}

// A warpgroup without rows in this tile only hands the stages back.
template <class Config>
__device__ __forceinline__ void pass_by(SharedStorage<Config>& shared, int32_t num_stages,
                                        RingPosition<Config::kStages>& position) {
  for (int32_t i = 0; i < num_stages; ++i) {
    mbarrier_wait(&shared.full[position.stage], position.phase);
    release<Config>(shared, position.stage);
    position.advance();
  }
}

}  // namespace conclave::inline v0::experts::tile_sm90

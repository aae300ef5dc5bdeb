// Products of tile_sm90: each warpgroup multiplies 64 rows of a tile.
#pragma once

#include "cuda/device/wgmma.cuh"
#include "experts/cuda/sm90/tile/config.cuh"

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

// Multiplies 64 rows. One group of wgmma stays in flight; the stage before it goes back to the
// producer.
template <class Config>
struct Multiplier {
  SharedStorage<Config>& shared;
  uint64_t tokens;
  uint64_t features;
  RingPosition<Config::kStages> position;

  __device__ Multiplier(SharedStorage<Config>& storage, int32_t first_row)
      : shared(storage),
        tokens(wgmma_descriptor_128b(shared_address(storage.tokens[0]) +
                                     first_row * Config::kRowBytes)),
        features(wgmma_descriptor_128b(shared_address(storage.features[0]))) {}

  // Starts the products of the next stage.
  template <int kSums>
  __device__ __forceinline__ void start(bool is_first, float (&sums)[kSums]) const {
    mbarrier_wait(&shared.full[position.slot], position.phase);
    // cp.async writes through the generic proxy, wgmma reads through the async proxy.
    if constexpr (Config::kGathers) fence_proxy_async_shared();
    const uint64_t a = tokens + static_cast<uint32_t>(position.slot * (Config::kTokenBytes / 16));
    const uint64_t b =
        features + static_cast<uint32_t>(position.slot * (Config::kFeatureBytes / 16));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Wgmma<typename Config::Element, 2 * kSums>::mma(sums, a + step * 2, b + step * 2,
                                                      step > 0 || !is_first);
    }
    wgmma_commit_group();
  }
  // Starts the next stage and hands the one before it back.
  template <int kSums>
  __device__ __forceinline__ void follow(float (&sums)[kSums]) {
    const int32_t previous = position.slot;
    position.advance();
    start(false, sums);
    wgmma_wait_group<1>();
    release<Config>(shared, previous);
  }
  __device__ __forceinline__ void finish() {
    wgmma_wait_group<0>();
    release<Config>(shared, position.slot);
    position.advance();
  }
};

// A warpgroup without rows in this tile only hands the stages back.
template <class Config>
__device__ __forceinline__ void pass_by(SharedStorage<Config>& shared, int32_t num_stages,
                                        RingPosition<Config::kStages>& position) {
  for (int32_t i = 0; i < num_stages; ++i) {
    mbarrier_wait(&shared.full[position.slot], position.phase);
    release<Config>(shared, position.slot);
    position.advance();
  }
}

}  // namespace conclave::inline v0::experts::tile_sm90

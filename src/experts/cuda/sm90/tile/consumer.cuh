// The products: each warpgroup multiplies 64 rows of an item.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/wgmma.cuh"
#include "experts/cuda/common/ring.cuh"
#include "experts/cuda/sm90/tile/config.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::tile {

template <class Config>
__device__ __forceinline__ void release(SharedStorage<Config>& shared, int32_t stage) {
  const uint32_t lane = threadIdx.x % 32;
  if constexpr (Config::kCluster == 1) {
    if (lane == 0) ptx::mbarrier_arrive(&shared.empty[stage]);
  } else {
    if (lane < Config::kCluster) ptx::mbarrier_arrive_cluster(&shared.empty[stage], lane);
  }
}

// Multiplies 64 rows. One group of wgmma stays in flight; the stage before it goes back to the
// producer.
template <class Config>
struct Multiplier {
  SharedStorage<Config>& shared;
  uint64_t tokens;
  uint64_t features;
  RingPosition<Config::kStages> ring;

  __device__ Multiplier(SharedStorage<Config>& storage, int32_t first_row)
      : shared(storage),
        tokens(ptx::wgmma_descriptor_128b(ptx::shared_address(storage.tokens[0]) +
                                          first_row * Config::kRowBytes)),
        features(ptx::wgmma_descriptor_128b(ptx::shared_address(storage.features[0]))) {}

  // Starts the products of the next stage.
  template <int kSums>
  __device__ __forceinline__ void start(bool is_first, float (&sums)[kSums]) const {
    ptx::mbarrier_wait(&shared.full[ring.slot], ring.phase);
    // cp.async writes through the generic proxy, wgmma reads through the async proxy.
    if constexpr (Config::kGathers) ptx::fence_proxy_async_shared();
    const uint64_t a = tokens + static_cast<uint32_t>(ring.slot * (Config::kTokenBytes / 16));
    const uint64_t b = features + static_cast<uint32_t>(ring.slot * (Config::kFeatureBytes / 16));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::Wgmma<typename Config::Element, 2 * kSums>::mma(sums, a + step * 2, b + step * 2,
                                                           step > 0 || !is_first);
    }
    ptx::wgmma_commit_group();
  }
  // Starts the next stage and hands the one before it back.
  template <int kSums>
  __device__ __forceinline__ void follow(float (&sums)[kSums]) {
    const int32_t previous = ring.slot;
    ring.advance();
    start(false, sums);
    ptx::wgmma_wait_group<1>();
    release<Config>(shared, previous);
  }
  __device__ __forceinline__ void finish() {
    ptx::wgmma_wait_group<0>();
    release<Config>(shared, ring.slot);
    ring.advance();
  }
};

// A warpgroup without rows in this item only hands the stages back.
template <class Config>
__device__ __forceinline__ void pass_by(SharedStorage<Config>& shared, int32_t num_stages,
                                        RingPosition<Config::kStages>& ring) {
  for (int32_t i = 0; i < num_stages; ++i) {
    ptx::mbarrier_wait(&shared.full[ring.slot], ring.phase);
    release<Config>(shared, ring.slot);
    ring.advance();
  }
}

}  // namespace conclave::inline v0::experts::tile

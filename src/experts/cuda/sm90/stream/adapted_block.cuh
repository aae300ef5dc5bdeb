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
// terms, may begin at once too, since it relies on the grouping alone being done. Counters of the
// forward before were used by launches that have ended.
template <class Config>
__device__ __forceinline__ void produce_beside_terms(const Params& params,
                                                     SharedStorage<Config>& shared) {
  clear_hand_over(params);
  ptx::grid_launch_dependents();
  const Walk<Config> walk(params);
  load_items<Config, Product::kUp>(walk, shared, UpNumbers(params, walk.items),
                                   walk.at(static_cast<int32_t>(blockIdx.x)), 0);
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
    if constexpr (kProduct == Product::kUp) ptx::grid_dependency_wait();
    consume<Config, kProduct, Consumer>(params, shared);
    return;
  }
  if constexpr (Config::kMovesRegisters) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
  }
  const int32_t helper = warp - Config::kConsumerWarps - 1;
  if (helper < 0) {
    if (!ptx::elect_one()) return;
    if constexpr (kProduct == Product::kUp) {
      produce_beside_terms(params, shared);
    } else {
      produce_down(params, shared);
    }
  } else if (helper < gather_warps<Config, kProduct>()) {
    // Rows of bytes have scales, which are read by way of L1 and so behind the wait.
    if constexpr (kProduct == Product::kUp && Config::kIsByte) ptx::grid_dependency_wait();
    gather<Config, kProduct>(params, shared, helper);
  }
}

}  // namespace conclave::inline v0::experts::stream

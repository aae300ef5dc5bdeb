// Messages of a kernel that makes what it sends: of units, of which each block of threads stores
// and takes its share. Each share has a flag, and sender and receiver cut alike.
#pragma once

#include "comm/nccl/window_layout.h"
#include "comm/nccl/window_parts.cuh"
#include "cuda/device/system_flag.cuh"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::comm::window {

struct Units {
  int64_t begin;
  int64_t end;
};
// Those of this block, of `units` in all.
__device__ __forceinline__ Units units_of(const WindowParams& params, int64_t units) {
  const int64_t share = units_of_block(units, params.lane_bits);
  const int64_t begin = share * blockIdx.x;
  return {begin < units ? begin : units, begin + share < units ? begin + share : units};
}
__device__ __forceinline__ bool has_flag_of_units(const WindowParams& params, int64_t units) {
  return blockIdx.x == 0 || units_of_block(units, params.lane_bits) * blockIdx.x < units;
}

// A unit for `peer` lies here in its window.
__device__ __forceinline__ std::byte* unit_at(const WindowParams& params, uint32_t epoch,
                                              int32_t peer, int64_t offset) {
  return params.messages[peer].window +
         slot_offset(epoch, params.rank, peer, params.ranks, params.slot_bytes) + offset;
}

// Behind a barrier of those that have stored: a thread for each peer. The first block's flag brings
// the claim, whatever the message.
__device__ __forceinline__ void raise_flag_of_units(const WindowParams& params, uint32_t epoch,
                                                    int32_t peer, int64_t units) {
  if (!has_flag_of_units(params, units)) return;
  device::store_release_system(&head(params.messages[peer].window).flags[params.rank][blockIdx.x],
                               epoch);
}

// Called by all threads of a block: one warp waits for the units of this block, another for the
// claims, without which none is taken. `units(peer)` come from a peer. False: nothing may be taken.
template <class UnitsOf>
__device__ __forceinline__ bool await_units(const WindowParams& params, uint32_t epoch,
                                            const UnitsOf& units, volatile int& differs) {
  constexpr uint32_t kWarp = 32;
  static_assert(kMaxWindowRanks <= kWarp);
  const auto peer = static_cast<int32_t>(threadIdx.x % kWarp);
  bool came = true;
  if (threadIdx.x < 2 * kWarp && peer < params.ranks && peer != params.rank) {
    if (threadIdx.x >= kWarp) {
      came = await_claim(params, peer, epoch, differs);
    } else if (blockIdx.x != 0 && has_flag_of_units(params, units(peer))) {
      came = await_flag(params, &head(params.window).flags[peer][blockIdx.x], epoch, differs);
    }
  }
  return __syncthreads_and(static_cast<int>(came)) != 0;
}

}  // namespace conclave::inline v0::comm::window

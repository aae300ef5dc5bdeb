// The kernel of an exchange whose messages fit into their slots. A block of threads stores its
// stripes into the peers' windows, raises their flags, waits for those that it expects, and
// finishes what has come.
#pragma once

#include "comm/nccl/window_parts.cuh"

#include <cstdint>

namespace conclave::inline v0::comm {

inline constexpr int kWindowThreads = 512;

namespace window {

// One warp waits for the bytes of this block, another for the claims, without which no byte is
// taken: a thread for each peer.
__device__ __forceinline__ bool await(const WindowParams& params, uint32_t epoch,
                                      volatile int& differs) {
  constexpr uint32_t kWarp = 32;
  static_assert(kMaxWindowRanks <= kWarp);
  const auto peer = static_cast<int32_t>(threadIdx.x % kWarp);
  if (threadIdx.x >= 2 * kWarp || peer >= params.ranks || peer == params.rank) return true;
  if (threadIdx.x >= kWarp) return await_claim(params, peer, epoch, differs);
  return await_stripe(params, peer, epoch, differs);
}

}  // namespace window

template <class Take>
__global__ void __launch_bounds__(kWindowThreads, 1)
    window_kernel(const __grid_constant__ WindowParams params, const Take take) {
  __shared__ int differs;
  const window::Team<kWindowThreads> team{static_cast<int>(threadIdx.x)};
  const window::Turn turn = window::begin_turn(params);
  const uint32_t epoch = turn.epoch;
  if (threadIdx.x == 0) differs = 0;
  window::say_claims(params, epoch);
  window::push_stripes(params, epoch, team);
  __syncthreads();
  window::raise_flags(params, epoch, team.thread);
  window::mark_turn(params);
  const WindowMessage& own = params.messages[params.rank];
  const window::Piece stripe = window::stripe_of(params, own.send_bytes);
  if (stripe.bytes > 0) {
    window::copy(team, own.send + stripe.begin, own.recv + stripe.begin, stripe.bytes);
  }
  if (__syncthreads_and(window::await(params, epoch, differs)) != 0) {
    take.stripes(params, epoch, team);
  }
  window::finish(params, turn);
}

}  // namespace conclave::inline v0::comm

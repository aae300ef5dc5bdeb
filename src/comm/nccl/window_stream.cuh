// The kernel of an exchange whose messages are longer than a slot. Each block has a lane of every
// message; half of its threads store chunk after chunk into the peers' windows, the other half
// takes those that come and says so, so that their place is free for the one after the next.
#pragma once

#include "comm/nccl/window_chunks.cuh"
#include "comm/nccl/window_parts.cuh"
#include "cuda/device/system_flag.cuh"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::comm {

inline constexpr int kStreamTeam = 256;
inline constexpr int kStreamThreads = 2 * kStreamTeam;

namespace window {

using Half = Team<kStreamTeam>;

// All threads of a half meet, and go on together or not at all.
__device__ __forceinline__ bool go_on(uint32_t barrier, const volatile int& differs) {
  return !device::named_barrier_or(barrier, kStreamTeam, differs != 0);
}

// False where nothing was left to push to anyone.
template <class Push>
__device__ __forceinline__ bool for_chunks_out(const WindowParams& params, int64_t number,
                                               const Push& push) {
  bool some = false;
#pragma unroll 1
  for (int32_t step = 1; step < params.ranks; ++step) {
    const int32_t peer = (params.rank + step) % params.ranks;
    const Piece chunk = chunk_of(params, params.messages[peer].send_bytes, number);
    if (chunk.bytes <= 0) continue;
    if (!push(peer, chunk)) return false;
    some = true;
  }
  return some;
}

__device__ __forceinline__ void push_all(const WindowParams& params, uint32_t epoch,
                                         const Half& team, volatile int& differs) {
  constexpr uint32_t kBarrier = 1;
  push_stripes(params, epoch, team);
  if (!go_on(kBarrier, differs)) return;
  raise_flags(params, epoch, team.thread);
  int64_t number = 0;
  const auto push = [&](int32_t peer, const Piece& chunk) {
    const WindowMessage& message = params.messages[peer];
    if (number >= kChunksInFlight) {
      const uint64_t* const taken = &head(params.window).taken[peer][blockIdx.x];
      const uint64_t wanted = progress(epoch, number - kChunksInFlight + 1);
      if (team.thread == 0 && !await_flag(params, taken, wanted, differs)) differs = 1;
      if (!go_on(kBarrier, differs)) return false;
    }
    std::byte* const slot =
        message.window + slot_offset(epoch, params.rank, peer, params.ranks, params.slot_bytes);
    copy(team, message.send + chunk.begin, slot + chunk_place(params, number), chunk.bytes);
    if (!go_on(kBarrier, differs)) return false;
    if (team.thread == 0) {
      device::store_release_system(&head(message.window).arrived[params.rank][blockIdx.x],
                                   progress(epoch, number + 1));
    }
    return true;
  };
  while (for_chunks_out(params, number, push)) ++number;
}

// Waits for chunk `number` of every peer that sends so many, a thread for each. False if none does.
__device__ __forceinline__ bool await_chunks(const WindowParams& params, uint32_t epoch,
                                             int64_t number, const Half& team,
                                             volatile int& differs) {
  bool some = false;
#pragma unroll 1
  for (int32_t peer = 0; peer < params.ranks; ++peer) {
    if (peer == params.rank) continue;
    if (chunk_of(params, params.messages[peer].recv_bytes, number).bytes <= 0) continue;
    some = true;
    if (team.thread != peer) continue;
    const uint64_t* const arrived = &head(params.window).arrived[peer][blockIdx.x];
    if (!await_flag(params, arrived, progress(epoch, number + 1), differs)) differs = 1;
  }
  return some;
}

// Whoever waits for the place of a chunk learns that it is free.
__device__ __forceinline__ void free_chunks(const WindowParams& params, uint32_t epoch,
                                            int64_t number, const Half& team) {
  const int32_t peer = team.thread;
  if (peer >= params.ranks || peer == params.rank) return;
  const WindowMessage& message = params.messages[peer];
  if (chunk_of(params, message.recv_bytes, number + kChunksInFlight).bytes <= 0) return;
  device::store_release_system(&head(message.window).taken[params.rank][blockIdx.x],
                               progress(epoch, number + 1));
}

__device__ __forceinline__ void copy_own(const WindowParams& params, const Half& team) {
  const WindowMessage& own = params.messages[params.rank];
  const int64_t lane = lane_bytes_of(own.send_bytes, params.lane_bits);
  const int64_t begin = lane * blockIdx.x;
  const int64_t end = begin + lane < own.send_bytes ? begin + lane : own.send_bytes;
  if (begin < end) copy(team, own.send + begin, own.recv + begin, end - begin);
}

template <class Take>
__device__ __forceinline__ void take_all(const WindowParams& params, uint32_t epoch,
                                         const Half& team, const Take& take,
                                         volatile int& differs) {
  constexpr uint32_t kBarrier = 2;
  copy_own(params, team);
  const int32_t peer = team.thread;
  if (peer < params.ranks && peer != params.rank &&
      !(await_claim(params, peer, epoch, differs) && await_stripe(params, peer, epoch, differs))) {
    differs = 1;
  }
  if (!go_on(kBarrier, differs)) return;
  take.stripes(params, epoch, team);
  for (int64_t number = 0; await_chunks(params, epoch, number, team, differs); ++number) {
    if (!go_on(kBarrier, differs)) return;
    take.chunks(params, epoch, number, team);
    if (!go_on(kBarrier, differs)) return;
    free_chunks(params, epoch, number, team);
  }
}

}  // namespace window

template <class Take>
__global__ void __launch_bounds__(kStreamThreads, 1)
    stream_kernel(const __grid_constant__ WindowParams params, const Take take) {
  __shared__ int differs;
  const window::Turn turn = window::begin_turn(params);
  const uint32_t epoch = turn.epoch;
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread == 0) differs = 0;
  window::say_claims(params, epoch);
  window::mark_turn(params);
  __syncthreads();
  if (thread < kStreamTeam) {
    window::push_all(params, epoch, {thread}, differs);
  } else {
    window::take_all(params, epoch, {thread - kStreamTeam}, take, differs);
  }
  window::finish(params, turn);
}

}  // namespace conclave::inline v0::comm

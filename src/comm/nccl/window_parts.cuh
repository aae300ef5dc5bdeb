// Steps that the kernels of windows share: claims, flags, waits that end, copies of any alignment.
#pragma once

#include "comm/nccl/window_layout.h"
#include "comm/nccl/window_steps.h"
#include "cuda/device/system_flag.cuh"

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace conclave::inline v0::comm::window {

namespace device = cuda::device;

__device__ __forceinline__ WindowHead& head(std::byte* window) {
  return *reinterpret_cast<WindowHead*>(window);
}

// Numbers of this operation, read before anything waits.
struct Turn {
  uint32_t epoch;
  uint32_t ended;  // its mark of the end
};
__device__ __forceinline__ Turn begin_turn(const WindowParams& params) {
  const volatile uint32_t* const epoch = &params.turns->epoch;
  const volatile uint32_t* const ended = params.marks.ended_count;
  return {*epoch + 1, ended == nullptr ? 0 : *ended + 1};
}

// Some threads of a block work together.
template <int kCount>
struct Team {
  static constexpr int kThreads = kCount;
  int thread;
};

template <class Unit, class Threads>
__device__ __forceinline__ void copy_units(const Threads& team, const std::byte* from,
                                           std::byte* to, int64_t units) {
  constexpr int kThreads = Threads::kThreads;
  constexpr int kAhead = 4;
  const auto* const source = reinterpret_cast<const Unit*>(from);
  auto* const target = reinterpret_cast<Unit*>(to);
  int64_t i = team.thread;
  for (; i + (kAhead - 1) * kThreads < units; i += kAhead * kThreads) {
    Unit values[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) values[k] = __ldcg(source + i + k * kThreads);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) target[i + k * kThreads] = values[k];
  }
  for (; i < units; i += kThreads) target[i] = __ldcg(source + i);
}

// By the widest units that both ends are aligned to, then byte by byte.
template <class Threads>
__device__ __forceinline__ void copy(const Threads& team, const std::byte* from, std::byte* to,
                                     int64_t bytes) {
  const auto place = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to);
  int64_t done = 0;
  if (place % sizeof(uint4) == 0) {
    copy_units<uint4>(team, from, to, bytes / static_cast<int64_t>(sizeof(uint4)));
    done = bytes / static_cast<int64_t>(sizeof(uint4)) * static_cast<int64_t>(sizeof(uint4));
  } else if (place % sizeof(uint32_t) == 0) {
    copy_units<uint32_t>(team, from, to, bytes / static_cast<int64_t>(sizeof(uint32_t)));
    done = bytes / static_cast<int64_t>(sizeof(uint32_t)) * static_cast<int64_t>(sizeof(uint32_t));
  }
  copy_units<uint8_t>(team, from + done, to + done, bytes - done);
}

__device__ __forceinline__ const std::byte* arrived(const WindowParams& params, uint32_t epoch,
                                                    int32_t sender) {
  return params.window + slot_offset(epoch, sender, params.rank, params.ranks, params.slot_bytes);
}

// Operations of a communicator follow one another, so that nobody else counts meanwhile.
__device__ __forceinline__ void count_up(uint32_t* count, uint32_t* mark) {
  const uint32_t next = *static_cast<volatile uint32_t*>(count) + 1;
  *count = next;
  *static_cast<volatile uint32_t*>(mark) = next;
}

// The first block says the claims, which its flags bring: a thread for each peer.
__device__ __forceinline__ void say_claims(const WindowParams& params, uint32_t epoch) {
  const auto peer = static_cast<int32_t>(threadIdx.x);
  if (blockIdx.x != 0 || peer >= params.ranks || peer == params.rank) return;
  const WindowMessage& message = params.messages[peer];
  params.claims_out[peer < params.rank ? peer : peer - 1] = message.claim;
  head(message.window).claims[epoch % kEpochs][params.rank] = message.claim;
}

// Behind the flags, which would wait for what goes to the host; by a thread that waits for nobody.
__device__ __forceinline__ void mark_turn(const WindowParams& params) {
  if (blockIdx.x != 0 || threadIdx.x != blockDim.x - 1) return;
  if (params.marks.begun_count == nullptr) return;
  count_up(params.marks.begun_count, params.marks.begun);
  count_up(params.marks.collectives_count, params.marks.collectives);
}

// Whether a peer means what this rank does. The first block tells the host where it does not.
__device__ __forceinline__ bool agrees(const WindowParams& params, int32_t peer, uint32_t epoch) {
  const DeviceClaim mine = params.messages[peer].claim;
  const auto* const said = &head(params.window).claims[epoch % kEpochs][peer];
  DeviceClaim theirs;
  theirs.code = __ldcg(&said->code);
  theirs.peer = peer;
  theirs.offered = __ldcg(&said->offered);
  theirs.expected = __ldcg(&said->expected);
  const bool agree = mine.code == theirs.code && mine.expected == theirs.offered &&
                     mine.offered == theirs.expected;
  if (blockIdx.x != 0) return agree;
  params.claims_in[peer < params.rank ? peer : peer - 1] = theirs;
  if (agree || atomicAdd(params.marks.mismatches_count, 1U) != 0) return agree;
  *params.marks.mine = mine;
  *params.marks.theirs = theirs;
  __threadfence_system();
  *static_cast<volatile uint32_t*>(params.marks.mismatches) = 1;
  return agree;
}

// False where a peer means another operation, or the communicator has failed meanwhile: its watch
// knows deadlines, and stops waits.
template <class Count>
__device__ __forceinline__ bool await_flag(const WindowParams& params, const Count* flag,
                                           Count wanted, const volatile int& differs) {
  constexpr uint32_t kLooks = 1024;  // before a look at the host, which takes longer
  for (uint32_t looks = 1;
       static_cast<std::make_signed_t<Count>>(device::load_acquire_system(flag) - wanted) < 0;
       ++looks) {
    if (differs != 0) return false;
    if (looks % kLooks == 0 && *static_cast<const volatile uint32_t*>(params.stop) != 0) {
      return false;
    }
  }
  return true;
}

// Whether `peer` has said its claim and means the same.
__device__ __forceinline__ bool await_claim(const WindowParams& params, int32_t peer,
                                            uint32_t epoch, volatile int& differs) {
  if (!await_flag(params, &head(params.window).flags[peer][0], epoch, differs)) return false;
  if (agrees(params, peer, epoch)) return true;
  differs = 1;
  return false;
}

// Short messages, each of which fits into its slot, go by stripes.
__device__ __forceinline__ bool is_short(const WindowParams& params, int64_t bytes) {
  return bytes <= params.slot_bytes;
}
// A part of a message: the same for its sender and its receiver.
struct Piece {
  int64_t begin;
  int64_t bytes;  // not above 0: this block has none
};
__device__ __forceinline__ Piece stripe_of(const WindowParams& params, int64_t bytes) {
  const int64_t stripe = stripe_bytes_of(bytes, params.lane_bits);
  const int64_t begin = stripe * blockIdx.x;
  return {begin, begin + stripe < bytes ? stripe : bytes - begin};
}
// Whether this block has a flag of such a message.
__device__ __forceinline__ bool has_flag(const WindowParams& params, int64_t bytes) {
  return blockIdx.x == 0 || stripe_bytes_of(bytes, params.lane_bits) * blockIdx.x < bytes;
}

template <class Threads>
__device__ __forceinline__ void push_stripes(const WindowParams& params, uint32_t epoch,
                                             const Threads& team) {
#pragma unroll 1
  for (int32_t step = 1; step < params.ranks; ++step) {
    const int32_t peer = (params.rank + step) % params.ranks;
    const WindowMessage& message = params.messages[peer];
    const Piece stripe = stripe_of(params, message.send_bytes);
    if (stripe.bytes <= 0 || !is_short(params, message.send_bytes)) continue;
    std::byte* const slot =
        message.window + slot_offset(epoch, params.rank, peer, params.ranks, params.slot_bytes);
    copy(team, message.send + stripe.begin, slot + stripe.begin, stripe.bytes);
  }
}
// Behind a barrier of those that have pushed: a thread for each peer. The first block's flag brings
// the claim, whatever the message.
__device__ __forceinline__ void raise_flags(const WindowParams& params, uint32_t epoch,
                                            int32_t peer) {
  if (peer >= params.ranks || peer == params.rank) return;
  const WindowMessage& message = params.messages[peer];
  const bool has_stripe =
      is_short(params, message.send_bytes) && has_flag(params, message.send_bytes);
  if (blockIdx.x != 0 && !has_stripe) return;
  device::store_release_system(&head(message.window).flags[params.rank][blockIdx.x], epoch);
}
// Waits for the stripe of a peer. That of the first block came with its claim.
__device__ __forceinline__ bool await_stripe(const WindowParams& params, int32_t peer,
                                             uint32_t epoch, const volatile int& differs) {
  const int64_t bytes = params.messages[peer].recv_bytes;
  if (blockIdx.x == 0 || !is_short(params, bytes) || !has_flag(params, bytes)) return true;
  return await_flag(params, &head(params.window).flags[peer][blockIdx.x], epoch, differs);
}

// The last block that is done ends the operation.
__device__ __forceinline__ void finish(const WindowParams& params, const Turn& turn) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (gridDim.x > 1) {
    device::fence_device();
    if (atomicAdd(&params.turns->blocks_done, 1U) + 1 != gridDim.x) return;
    params.turns->blocks_done = 0;
  }
  params.turns->epoch = turn.epoch;
  if (params.marks.ended_count == nullptr) return;
  *params.marks.ended_count = turn.ended;
  device::store_release_system(params.marks.ended, turn.ended);
}

}  // namespace conclave::inline v0::comm::window

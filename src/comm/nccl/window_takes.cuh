// Bytes that have come through a window go to their place, or are added up.
#pragma once

#include "comm/nccl/ordered_sums.cuh"
#include "comm/nccl/window_chunks.cuh"
#include "comm/nccl/window_parts.cuh"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::comm::window {

// Copies what has come of each peer's message to its place.
struct PlaceArrived {
  template <class Threads>
  __device__ __forceinline__ void stripes(const WindowParams& params, uint32_t epoch,
                                          const Threads& team) const {
#pragma unroll 1
    for (int32_t step = 1; step < params.ranks; ++step) {
      const int32_t peer = (params.rank + step) % params.ranks;
      const WindowMessage& message = params.messages[peer];
      if (!is_short(params, message.recv_bytes)) continue;
      const Piece stripe = stripe_of(params, message.recv_bytes);
      place(team, message, stripe, arrived(params, epoch, peer) + stripe.begin);
    }
  }
  template <class Threads>
  __device__ __forceinline__ void chunks(const WindowParams& params, uint32_t epoch, int64_t number,
                                         const Threads& team) const {
#pragma unroll 1
    for (int32_t step = 1; step < params.ranks; ++step) {
      const int32_t peer = (params.rank + step) % params.ranks;
      const WindowMessage& message = params.messages[peer];
      place(team, message, chunk_of(params, message.recv_bytes, number),
            arrived(params, epoch, peer) + chunk_place(params, number));
    }
  }

 private:
  template <class Threads>
  static __device__ __forceinline__ void place(const Threads& team, const WindowMessage& message,
                                               const Piece& piece, const std::byte* from) {
    if (piece.bytes > 0) copy(team, from, message.recv + piece.begin, piece.bytes);
  }
};

// out = part of rank 0 op part of rank 1 op ...; each message is an addend of `bytes` bytes.
template <class T, class Rule>
struct AddArrived {
  const std::byte* own;
  std::byte* out;
  int64_t bytes;
  bool aligned;  // to vectors

  template <class Threads>
  __device__ __forceinline__ void stripes(const WindowParams& params, uint32_t epoch,
                                          const Threads& team) const {
    if (!is_short(params, bytes)) return;
    const Piece stripe = stripe_of(params, bytes);
    add(params, epoch, team, stripe, stripe.begin);
  }
  template <class Threads>
  __device__ __forceinline__ void chunks(const WindowParams& params, uint32_t epoch, int64_t number,
                                         const Threads& team) const {
    add(params, epoch, team, chunk_of(params, bytes, number), chunk_place(params, number));
  }

 private:
  // `place`: where the piece lies in each peer's slot.
  template <class Threads>
  __device__ __forceinline__ void add(const WindowParams& params, uint32_t epoch,
                                      const Threads& team, const Piece& piece,
                                      int64_t place) const {
    if (piece.bytes <= 0) return;
    const auto part = [&](int32_t rank) {
      return reinterpret_cast<const T*>(rank == params.rank ? own + piece.begin
                                                            : arrived(params, epoch, rank) + place);
    };
    add_parts<T, Rule>(part, params.ranks, reinterpret_cast<T*>(out + piece.begin),
                       piece.bytes / static_cast<int64_t>(sizeof(T)), aligned, team.thread,
                       Threads::kThreads);
  }
};

}  // namespace conclave::inline v0::comm::window

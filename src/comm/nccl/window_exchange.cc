#include "comm/nccl/window_exchange.h"

#include "comm/nccl/blocks.h"
#include "cuda/check.h"

#include <cuda_runtime_api.h>

namespace conclave::inline v0::comm {
namespace {

size_t index(int32_t rank) { return static_cast<size_t>(rank); }

// The bytes of each message of a collective but all-to-all.
int64_t message_bytes(const CommOperation& operation) {
  switch (operation.kind) {
    case CommKind::kReduceScatter:
      return operation.recv.size();
    case CommKind::kBarrier:
      return 0;
    default:
      return operation.send.size();
  }
}

WindowMarks marks_at(const MarkPlace& place) {
  const auto cell = static_cast<size_t>(place.cell);
  MarkCounters& counters = *place.counters;
  Marks& marks = *place.marks;
  return {.begun_count = counters.begun.data() + cell,
          .begun = marks.begun.data() + cell,
          .collectives_count = &counters.collectives,
          .collectives = &marks.collectives,
          .ended_count = counters.ended.data() + cell,
          .ended = marks.ended.data() + cell,
          .mismatches_count = &counters.mismatches,
          .mismatches = &marks.mismatches,
          .mine = &marks.mine,
          .theirs = &marks.theirs};
}

}  // namespace

WindowExchange::WindowExchange(const WindowBlocks& windows, int32_t rank, Claims claims,
                               const uint32_t* stop)
    : windows_(windows), rank_(rank), claims_(claims), stop_(stop), turns_(sizeof(WindowTurns)) {
  cuda::check(cudaMemset(turns_.data(), 0, turns_.bytes()), "cudaMemset");
  cuda::check(cudaStreamSynchronize(cudaStreamLegacy), "cudaStreamSynchronize");
  prepare_window_steps();
}

bool WindowExchange::goes_by_blocks(const CommOperation& operation) const {
  const int32_t peers = windows_.ranks() - 1;
  return operation.kind == CommKind::kAllReduce && peers > 1 &&
         message_bytes(operation) > kAtOnceBytes / peers;
}

WindowParams WindowExchange::params_for(const DeviceClaims& claims, const MarkPlace& place) const {
  WindowParams params{.rank = rank_,
                      .ranks = windows_.ranks(),
                      .window = windows_.of_ranks[index(rank_)],
                      .slot_bytes = windows_.slot_bytes,
                      .lane_bits = windows_.lane_bits,
                      .turns = turns_.as<WindowTurns>(),
                      .stop = stop_,
                      .claims_out = claims_.out,
                      .claims_in = claims_.in,
                      .marks = marks_at(place),
                      .messages = {}};
  for (int32_t at = 0; at < claims.count; ++at) {
    const DeviceClaim& claim = claims.list[index(at)];
    WindowMessage& message = params.messages[claim.peer];
    message.window = windows_.of_ranks[index(claim.peer)];
    message.claim = claim;
  }
  return params;
}

void WindowExchange::launch(const CommOperation& operation, const DeviceClaims& claims,
                            const MarkPlace& place, CUstream_st* stream) const {
  WindowParams params = params_for(claims, place);
  if (goes_by_blocks(operation)) return add_by_blocks(operation, params, stream);
  if (adds_up(operation)) return add(operation, params, stream);
  exchange(operation, params, stream);
}

void WindowExchange::launch(const WindowKernel& kernel, const DeviceClaims& claims,
                            const MarkPlace& place, CUstream_st* stream) const {
  WindowParams params = params_for(claims, place);
  for (WindowMessage& message : params.messages) {
    message.send_bytes = message.claim.offered;
    message.recv_bytes = message.claim.expected;
  }
  kernel.enqueue(params, stream);
}

// The first launch has the mark of the turn and the second that of the end.
void WindowExchange::add_by_blocks(const CommOperation& operation, const WindowParams& params,
                                   CUstream_st* stream) const {
  WindowParams sums = params;
  WindowParams gathered = params;
  sums.marks.ended_count = nullptr;
  gathered.marks.begun_count = nullptr;
  const std::byte* const send = operation.send.data();
  std::byte* const recv = operation.recv.data();
  const auto block = [&](int32_t rank) {
    return block_of(operation.send.size(), windows_.ranks(), rank);
  };
  const Range mine = block(rank_);
  for (int32_t peer = 0; peer < windows_.ranks(); ++peer) {
    if (peer == rank_) continue;
    const Range theirs = block(peer);
    WindowMessage& part = sums.messages[peer];
    part.send = send + theirs.begin;
    part.send_bytes = theirs.bytes;
    part.recv_bytes = mine.bytes;
    WindowMessage& sum = gathered.messages[peer];
    sum.send = recv + mine.begin;
    sum.send_bytes = mine.bytes;
    sum.recv = recv + theirs.begin;
    sum.recv_bytes = theirs.bytes;
  }
  add_by_windows(sums,
                 {.own = send + mine.begin,
                  .out = recv + mine.begin,
                  .bytes = mine.bytes,
                  .dtype = operation.dtype,
                  .op = operation.reduce},
                 stream);
  exchange_by_windows(gathered, stream);
}

void WindowExchange::exchange(const CommOperation& operation, WindowParams& params,
                              CUstream_st* stream) const {
  const auto set = [&](int32_t peer, const std::byte* send, int64_t send_bytes, std::byte* recv,
                       int64_t recv_bytes) {
    if (peer == rank_ && send == recv) return;
    WindowMessage& message = params.messages[peer];
    message.send = send;
    message.send_bytes = send_bytes;
    message.recv = recv;
    message.recv_bytes = recv_bytes;
  };
  const AllToAllV& parts = operation.exchange;
  const int64_t bytes = message_bytes(operation);
  for (int32_t peer = 0; peer < windows_.ranks(); ++peer) {
    const size_t at = index(peer);
    if (operation.kind == CommKind::kAllToAllV) {
      set(peer, parts.send + parts.send_offsets[at], parts.send_bytes[at],
          parts.recv + parts.recv_offsets[at], parts.recv_bytes[at]);
    } else if (operation.kind == CommKind::kAllGather) {
      set(peer, operation.send.data(), bytes, operation.recv.data() + bytes * peer, bytes);
    }
  }
  exchange_by_windows(params, stream);
}

void WindowExchange::add(const CommOperation& operation, WindowParams& params,
                         CUstream_st* stream) const {
  const AllToAllV& parts = operation.exchange;
  const bool is_parts = operation.kind == CommKind::kAllToAllV;
  const bool is_scattered = operation.kind == CommKind::kReduceScatter;
  const int64_t bytes = is_parts ? parts.recv_bytes[index(rank_)] : message_bytes(operation);
  const auto block = [&](int32_t rank) {
    if (is_parts) return parts.send + parts.send_offsets[index(rank)];
    return operation.send.data() + (is_scattered ? bytes * rank : 0);
  };
  for (int32_t peer = 0; peer < windows_.ranks(); ++peer) {
    if (peer == rank_) continue;
    WindowMessage& message = params.messages[peer];
    message.send = block(peer);
    message.send_bytes = is_parts ? parts.send_bytes[index(peer)] : bytes;
    message.recv_bytes = bytes;
  }
  add_by_windows(params,
                 {.own = block(rank_),
                  .out = is_parts ? parts.recv : operation.recv.data(),
                  .bytes = bytes,
                  .dtype = operation.dtype,
                  .op = operation.reduce},
                 stream);
}

}  // namespace conclave::inline v0::comm

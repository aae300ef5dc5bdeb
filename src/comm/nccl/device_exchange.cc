#include "comm/nccl/device_exchange.h"

#include "comm/nccl/blocks.h"
#include "cuda/check.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cuda_runtime_api.h>
#include <span>

namespace conclave::inline v0::comm {
namespace {

constexpr auto kClaimBytes = static_cast<int64_t>(sizeof(DeviceClaim));

uint32_t code_of(const CommOperation& operation) {
  const auto kind = static_cast<uint32_t>(operation.kind);
  if (!adds_up(operation)) return kind;
  return kind | static_cast<uint32_t>(operation.dtype) << 8 |
         static_cast<uint32_t>(operation.reduce) << 16;
}

// Tells what a kernel of others' moves from the same bytes of the communicator's own.
constexpr uint32_t kByKernel = uint32_t{1} << 24;

size_t index(int32_t rank) { return static_cast<size_t>(rank); }

// The bytes for `peer`, or from it.
int64_t offered_to(const CommOperation& operation, int32_t peer) {
  switch (operation.kind) {
    case CommKind::kAllToAllV:
      return operation.exchange.send_bytes[index(peer)];
    case CommKind::kReduceScatter:
      return operation.recv.size();
    default:
      return operation.send.size();
  }
}
int64_t expected_from(const CommOperation& operation, int32_t peer) {
  return operation.kind == CommKind::kAllToAllV ? operation.exchange.recv_bytes[index(peer)]
                                                : offered_to(operation, peer);
}

Claim claim_of(const DeviceClaim& claim) {
  return {.kind = static_cast<CommKind>(claim.code & 0xFF),
          .dtype = static_cast<DType>(claim.code >> 8 & 0xFF),
          .reduce = static_cast<ReduceOp>(claim.code >> 16 & 0xFF),
          .offered = claim.offered,
          .expected = claim.expected};
}

}  // namespace

std::string text_of(const ClaimPair& claims, int32_t rank) {
  const Claim mine = claim_of(claims.mine);
  const Claim theirs = claim_of(claims.theirs);
  const int32_t peer = claims.theirs.peer;
  if (mine.kind != theirs.kind) {
    return fmt::format("rank {} is in {} where rank {} is in {}", peer, to_string(theirs.kind),
                       rank, to_string(mine.kind));
  }
  if (const auto why = disagreement(mine, rank, theirs, peer)) return *why;
  if (const auto why = disagreement(theirs, peer, mine, rank)) return *why;
  return "rank " + std::to_string(peer) + " means another operation";
}

DeviceExchange::DeviceExchange(NcclGroup& group, int32_t rank, int32_t ranks,
                               const PeerWindows* windows, const uint32_t* stop)
    : group_(group),
      rank_(rank),
      ranks_(ranks),
      counters_(sizeof(MarkCounters)),
      claims_out_(sizeof(DeviceClaim) * kMaxClaims),
      claims_in_(sizeof(DeviceClaim) * kMaxClaims),
      staging_(ranks > 1 && windows == nullptr ? static_cast<size_t>(kStagingBytes) : 0),
      copies_(cuda::make_stream()) {
  cuda::check(cudaMemset(counters_.data(), 0, counters_.bytes()), "cudaMemset");
  cuda::check(cudaStreamSynchronize(cudaStreamLegacy), "cudaStreamSynchronize");
  prepare_steps();
  if (windows == nullptr) return;
  windows_.emplace(windows->blocks(), rank,
                   WindowExchange::Claims{.out = claims_out_.as<DeviceClaim>(),
                                          .in = claims_in_.as<DeviceClaim>()},
                   stop);
}

template <class Body>
void DeviceExchange::for_each_peer(const Body& body) const {
  for (int32_t peer = 0; peer < ranks_; ++peer) {
    if (peer != rank_) body(peer);
  }
}

DeviceClaims DeviceExchange::claims_of(const CommOperation& operation) const {
  DeviceClaims claims;
  for_each_peer([&](int32_t peer) {
    claims.list[index(claims.count++)] = {.code = code_of(operation),
                                          .peer = peer,
                                          .offered = offered_to(operation, peer),
                                          .expected = expected_from(operation, peer)};
  });
  return claims;
}

std::optional<ClaimPair> DeviceExchange::find_disagreement() const {
  std::array<DeviceClaim, kMaxClaims> mine;
  std::array<DeviceClaim, kMaxClaims> theirs;
  const size_t bytes = sizeof(DeviceClaim) * static_cast<size_t>(ranks_ - 1);
  const auto copy_to = [&](DeviceClaim* to, const cuda::DeviceBuffer& from) {
    return cudaMemcpyAsync(to, from.data(), bytes, cudaMemcpyDeviceToHost, copies_.get()) ==
           cudaSuccess;
  };
  if (!copy_to(mine.data(), claims_out_) || !copy_to(theirs.data(), claims_in_)) return {};
  if (cudaStreamSynchronize(copies_.get()) != cudaSuccess) return {};
  for (size_t at = 0; at < static_cast<size_t>(ranks_ - 1); ++at) {
    theirs[at].peer = mine[at].peer;
    if (!agree(mine[at], theirs[at])) return ClaimPair{mine[at], theirs[at]};
  }
  return {};
}

void DeviceExchange::exchange_claims(NcclGroup::Calls& calls) const {
  int64_t at = 0;
  for_each_peer([&](int32_t peer) {
    calls.send(peer, claims_out_.data() + at, kClaimBytes);
    calls.recv(peer, claims_in_.data() + at, kClaimBytes);
    at += kClaimBytes;
  });
}

void DeviceExchange::collective(const CommOperation& operation, MarkPlace place,
                                CUstream_st* stream) {
  place.counters = counters_.as<MarkCounters>();
  const DeviceClaims claims = claims_of(operation);
  if (windows_) return windows_->launch(operation, claims, place, stream);
  mark_begun(place, true, claims, claims_out_.as<DeviceClaim>(), stream);
  move_bytes(operation, stream);
  mark_ended(place, claims, claims_in_.as<DeviceClaim>(), stream);
}

void DeviceExchange::through_windows(const CommOperation& operation, const WindowKernel& kernel,
                                     MarkPlace place, CUstream_st* stream) {
  place.counters = counters_.as<MarkCounters>();
  DeviceClaims claims = claims_of(operation);
  for (DeviceClaim& claim : std::span(claims.list).first(static_cast<size_t>(claims.count))) {
    claim.code |= kByKernel;
  }
  windows_->launch(kernel, claims, place, stream);
}

void DeviceExchange::move_bytes(const CommOperation& operation, CUstream_st* stream) {
  switch (operation.kind) {
    case CommKind::kAllToAllV:
      return all_to_all(operation.exchange, stream);
    case CommKind::kAllGather:
      return all_gather(operation, stream);
    case CommKind::kAllReduce:
      return all_reduce(operation, stream);
    case CommKind::kReduceScatter:
      return reduce_scatter(operation, stream);
    default: {  // a barrier: whoever has a peer's claim knows that it has come
      if (!has_peers()) return;
      NcclGroup::Calls calls(group_, stream);
      exchange_claims(calls);
      calls.end();
    }
  }
}

void DeviceExchange::copy(const std::byte* from, std::byte* to, int64_t bytes,
                          CUstream_st* stream) const {
  if (bytes == 0) return;
  cuda::check(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream),
      "cudaMemcpyAsync");
}

void DeviceExchange::all_to_all(const AllToAllV& exchange, CUstream_st* stream) {
  const size_t own = index(rank_);
  copy(exchange.send + exchange.send_offsets[own], exchange.recv + exchange.recv_offsets[own],
       exchange.send_bytes[own], stream);
  if (!has_peers()) return;
  NcclGroup::Calls calls(group_, stream);
  exchange_claims(calls);
  for_each_peer([&](int32_t peer) {
    const size_t at = index(peer);
    calls.send(peer, exchange.send + exchange.send_offsets[at], exchange.send_bytes[at]);
    calls.recv(peer, exchange.recv + exchange.recv_offsets[at], exchange.recv_bytes[at]);
  });
  calls.end();
}

void DeviceExchange::all_gather(const CommOperation& operation, CUstream_st* stream) {
  const int64_t bytes = operation.send.size();
  copy(operation.send.data(), operation.recv.data() + bytes * rank_, bytes, stream);
  if (!has_peers()) return;
  NcclGroup::Calls calls(group_, stream);
  exchange_claims(calls);
  for_each_peer([&](int32_t peer) {
    calls.send(peer, operation.send.data(), bytes);
    calls.recv(peer, operation.recv.data() + bytes * peer, bytes);
  });
  calls.end();
}

int64_t DeviceExchange::piece_bytes() const {
  return kStagingBytes / (ranks_ - 1) / kBlockAlignment * kBlockAlignment;
}

std::byte* DeviceExchange::staged(int32_t peer) const {
  return staging_.data() + piece_bytes() * (peer < rank_ ? peer : peer - 1);
}

OrderedParts DeviceExchange::parts(const std::byte* own) const {
  return {.own = own,
          .others = staging_.data(),
          .stride_bytes = piece_bytes(),
          .rank = rank_,
          .ranks = ranks_};
}

void DeviceExchange::all_reduce(const CommOperation& operation, CUstream_st* stream) {
  if (!has_peers()) {
    return copy(operation.send.data(), operation.recv.data(), operation.send.size(), stream);
  }
  if (operation.send.size() <= kAtOnceBytes / (ranks_ - 1)) {
    reduce_at_once(operation, stream);
  } else {
    reduce_by_blocks(operation, stream);
  }
}

void DeviceExchange::reduce_at_once(const CommOperation& operation, CUstream_st* stream) {
  const int64_t bytes = operation.send.size();
  NcclGroup::Calls calls(group_, stream);
  exchange_claims(calls);
  for_each_peer([&](int32_t peer) {
    calls.send(peer, operation.send.data(), bytes);
    calls.recv(peer, staged(peer), bytes);
  });
  calls.end();
  add_in_order(parts(operation.send.data()), operation.recv.data(), bytes, operation.dtype,
               operation.reduce, stream);
}

// Every rank adds up one block of each piece and gives the sums to all.
void DeviceExchange::reduce_by_blocks(const CommOperation& operation, CUstream_st* stream) {
  const int64_t bytes = operation.send.size();
  const int64_t most = piece_bytes() * ranks_;
  for (int64_t at = 0; at < bytes; at += most) {
    const int64_t now = std::min(most, bytes - at);
    const std::byte* const send = operation.send.data() + at;
    std::byte* const recv = operation.recv.data() + at;
    const Range mine = block_of(now, ranks_, rank_);
    {
      NcclGroup::Calls calls(group_, stream);
      if (at == 0) exchange_claims(calls);
      for_each_peer([&](int32_t peer) {
        const Range theirs = block_of(now, ranks_, peer);
        calls.send(peer, send + theirs.begin, theirs.bytes);
        calls.recv(peer, staged(peer), mine.bytes);
      });
      calls.end();
    }
    add_in_order(parts(send + mine.begin), recv + mine.begin, mine.bytes, operation.dtype,
                 operation.reduce, stream);
    NcclGroup::Calls calls(group_, stream);
    for_each_peer([&](int32_t peer) {
      const Range theirs = block_of(now, ranks_, peer);
      calls.send(peer, recv + mine.begin, mine.bytes);
      calls.recv(peer, recv + theirs.begin, theirs.bytes);
    });
    calls.end();
  }
}

void DeviceExchange::reduce_scatter(const CommOperation& operation, CUstream_st* stream) {
  const int64_t bytes = operation.recv.size();
  const std::byte* const send = operation.send.data();
  if (!has_peers()) return copy(send, operation.recv.data(), bytes, stream);
  int64_t at = 0;
  do {
    const int64_t now = std::min(piece_bytes(), bytes - at);
    NcclGroup::Calls calls(group_, stream);
    if (at == 0) exchange_claims(calls);
    for_each_peer([&](int32_t peer) {
      calls.send(peer, send + bytes * peer + at, now);
      calls.recv(peer, staged(peer), now);
    });
    calls.end();
    add_in_order(parts(send + bytes * rank_ + at), operation.recv.data() + at, now, operation.dtype,
                 operation.reduce, stream);
    at += now;
  } while (at < bytes);
}

// The halves of messages to oneself meet in their order.
void DeviceExchange::copy_own_messages(std::span<const CommOperation> operations,
                                       CUstream_st* stream) const {
  const auto next_own = [&](CommKind kind, size_t from) {
    while (from < operations.size() &&
           (operations[from].kind != kind || operations[from].peer != rank_)) {
      ++from;
    }
    return from;
  };
  size_t out = next_own(CommKind::kSend, 0);
  size_t in = next_own(CommKind::kRecv, 0);
  for (; out < operations.size() && in < operations.size();
       out = next_own(CommKind::kSend, out + 1), in = next_own(CommKind::kRecv, in + 1)) {
    const ConstByteView& from = operations[out].send;
    const ByteView& to = operations[in].recv;
    const Claim sent{.kind = CommKind::kSend, .offered = from.size()};
    const Claim wanted{.kind = CommKind::kRecv, .expected = to.size()};
    if (const auto why = disagreement(wanted, rank_, sent, rank_)) {
      throw CommError(ErrorCode::kCommMismatch, rank_, "begin", *why);
    }
    copy(from.data(), to.data(), from.size(), stream);
  }
  if (out == operations.size() && in == operations.size()) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "a message of a rank to itself lacks its other half",
               .tensor = "peer",
               .expected = "both begun before either is waited for",
               .found = std::to_string(rank_)});
}

void DeviceExchange::messages(std::span<const CommOperation> operations, MarkPlace place,
                              CUstream_st* stream) {
  place.counters = counters_.as<MarkCounters>();
  DeviceClaims out;
  DeviceClaims expected;
  constexpr auto kCode = static_cast<uint32_t>(CommKind::kSend);
  for (const CommOperation& operation : operations) {
    if (operation.peer == rank_) continue;
    DeviceClaims& claims = operation.kind == CommKind::kSend ? out : expected;
    claims.list[index(claims.count++)] = {.code = kCode,
                                          .peer = operation.peer,
                                          .offered = operation.send.size(),
                                          .expected = operation.recv.size()};
  }
  mark_begun(place, false, out, claims_out_.as<DeviceClaim>(), stream);
  copy_own_messages(operations, stream);
  if (out.count + expected.count > 0) move_messages(operations, stream);
  mark_ended(place, expected, claims_in_.as<DeviceClaim>(), stream);
}

// NCCL matches those of a pair of ranks by their order.
void DeviceExchange::move_messages(std::span<const CommOperation> operations,
                                   CUstream_st* stream) const {
  NcclGroup::Calls calls(group_, stream);
  const std::byte* claim_out = claims_out_.data();
  std::byte* claim_in = claims_in_.data();
  for (const CommOperation& operation : operations) {
    if (operation.peer == rank_) continue;
    if (operation.kind == CommKind::kSend) {
      calls.send(operation.peer, claim_out, kClaimBytes);
      calls.send(operation.peer, operation.send.data(), operation.send.size());
      claim_out += kClaimBytes;
    } else {
      calls.recv(operation.peer, claim_in, kClaimBytes);
      calls.recv(operation.peer, operation.recv.data(), operation.recv.size());
      claim_in += kClaimBytes;
    }
  }
  calls.end();
}

}  // namespace conclave::inline v0::comm

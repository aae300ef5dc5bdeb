#include "comm/message/message_operation.h"

#include "comm/reduce.h"

#include <algorithm>
#include <cstring>

namespace conclave::inline v0::comm {
namespace {

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

// The part that goes to each peer and comes from it. A rank's own part moves at once.
struct Filler {
  MessageOperation& operation;
  int32_t me;

  void set(int32_t peer, size_t round, const std::byte* from, int64_t out_bytes, std::byte* to,
           int64_t in_bytes) const {
    PeerPart& part = operation.parts[static_cast<size_t>(peer)];
    Lane& lane = part.lanes[round];
    lane = {.from = from, .out_bytes = out_bytes, .to = to, .in_bytes = in_bytes};
    if (peer != me) return;
    // Nothing is copied if the two counts differ, and matching the part says why.
    if (out_bytes == in_bytes) copy_bytes(to, from, in_bytes);
    lane.sent = out_bytes;
    lane.received = in_bytes;
  }
  // A message to oneself travels as one to others: the operation at its other end is another.
  Lane& message() const { return operation.parts[static_cast<size_t>(operation.peer)].lanes[0]; }
  void claim(int32_t peer, int64_t offered, int64_t expected) const {
    PeerPart& part = operation.parts[static_cast<size_t>(peer)];
    part.involved = true;
    part.claim = {.kind = operation.kind,
                  .dtype = operation.dtype,
                  .reduce = operation.reduce,
                  .offered = offered,
                  .expected = expected};
  }
};

void describe_exchange(const AllToAllV& exchange, int32_t ranks, const Filler& fill) {
  for (int32_t peer = 0; peer < ranks; ++peer) {
    const auto at = static_cast<size_t>(peer);
    const int64_t out = exchange.send_bytes[at];
    const int64_t in = exchange.recv_bytes[at];
    fill.claim(peer, out, in);
    fill.set(peer, 0, out == 0 ? nullptr : exchange.send + exchange.send_offsets[at], out,
             in == 0 ? nullptr : exchange.recv + exchange.recv_offsets[at], in);
  }
}

void describe_gather(const CommOperation& from, int32_t ranks, const Filler& fill) {
  const int64_t bytes = from.send.size();
  for (int32_t peer = 0; peer < ranks; ++peer) {
    fill.claim(peer, bytes, bytes);
    fill.set(peer, 0, from.send.data(), bytes, from.recv.data() + peer * bytes, bytes);
  }
}

// The first byte of a rank's block of a vector that all ranks get.
int64_t block_begin(int64_t bytes, DType dtype, int32_t rank, int32_t ranks) {
  const int64_t step = byte_size(dtype);
  return bytes / step * rank / ranks * step;
}

std::byte* addend(MessageOperation& operation, int32_t rank) {
  return operation.addends.data() + rank * operation.sum_bytes;
}

void open_sum(MessageOperation& operation, std::byte* sum, int64_t bytes, int32_t ranks) {
  operation.sum = sum;
  operation.sum_bytes = bytes;
  operation.reduced = false;
  operation.addends.resize(static_cast<size_t>(bytes) * static_cast<size_t>(ranks));
}

void describe_reduce_scatter(const CommOperation& from, int32_t ranks, const Filler& fill) {
  const int64_t block = from.recv.size();
  open_sum(fill.operation, from.recv.data(), block, ranks);
  for (int32_t peer = 0; peer < ranks; ++peer) {
    fill.claim(peer, from.send.size(), from.send.size());
    fill.set(peer, 0, from.send.data() + peer * block, block, addend(fill.operation, peer), block);
  }
}

// Few bytes go to every rank with the announcement, and each adds up all of them.
void describe_short_reduction(const CommOperation& from, int32_t ranks, const Filler& fill) {
  const int64_t bytes = from.send.size();
  open_sum(fill.operation, from.recv.data(), bytes, ranks);
  for (int32_t peer = 0; peer < ranks; ++peer) {
    fill.claim(peer, bytes, bytes);
    fill.set(peer, 0, from.send.data(), bytes, addend(fill.operation, peer), bytes);
  }
}

void describe_long_reduction(const CommOperation& from, int32_t ranks, const Filler& fill) {
  const int64_t bytes = from.send.size();
  const auto begin = [&](int32_t rank) { return block_begin(bytes, from.dtype, rank, ranks); };
  std::byte* const mine = from.recv.data() + begin(fill.me);
  const int64_t my_bytes = begin(fill.me + 1) - begin(fill.me);
  open_sum(fill.operation, mine, my_bytes, ranks);
  for (int32_t peer = 0; peer < ranks; ++peer) {
    const int64_t peer_bytes = begin(peer + 1) - begin(peer);
    fill.claim(peer, bytes, bytes);
    fill.set(peer, 0, from.send.data() + begin(peer), peer_bytes, addend(fill.operation, peer),
             my_bytes);
    if (peer != fill.me) {
      fill.set(peer, 1, mine, my_bytes, from.recv.data() + begin(peer), peer_bytes);
    }
  }
}

}  // namespace

void describe(const CommOperation& from, int32_t me, int32_t ranks, MessageOperation& to) {
  to.kind = from.kind;
  to.peer = from.peer;
  to.in_background = from.in_background;
  to.dtype = from.dtype;
  to.reduce = from.reduce;
  to.sum = nullptr;
  to.sum_bytes = 0;
  to.reduced = true;
  to.parts.assign(static_cast<size_t>(ranks), PeerPart());
  const Filler fill{to, me};
  switch (from.kind) {
    case CommKind::kAllToAllV:
      return describe_exchange(from.exchange, ranks, fill);
    case CommKind::kAllGather:
      return describe_gather(from, ranks, fill);
    case CommKind::kReduceScatter:
      return describe_reduce_scatter(from, ranks, fill);
    case CommKind::kAllReduce:
      if (from.send.size() <= kInlineBytes) return describe_short_reduction(from, ranks, fill);
      return describe_long_reduction(from, ranks, fill);
    case CommKind::kBarrier:
      for (int32_t peer = 0; peer < ranks; ++peer) fill.claim(peer, 0, 0);
      return;
    case CommKind::kSend:
      fill.claim(from.peer, from.send.size(), 0);
      fill.message() = {.from = from.send.data(), .out_bytes = from.send.size()};
      return;
    case CommKind::kRecv:
      fill.claim(from.peer, 0, from.recv.size());
      fill.message() = {.to = from.recv.data(), .in_bytes = from.recv.size()};
      return;
  }
}

bool is_complete(const MessageOperation& operation) {
  return operation.reduced && std::all_of(operation.parts.begin(), operation.parts.end(),
                                          [](const PeerPart& part) { return part.complete(); });
}

bool can_reduce(const MessageOperation& operation) {
  if (operation.reduced) return false;
  return std::all_of(operation.parts.begin(), operation.parts.end(), [](const PeerPart& part) {
    return part.matched && part.lanes[0].received == part.lanes[0].in_bytes;
  });
}

void add_up(MessageOperation& operation) {
  const int64_t bytes = operation.sum_bytes;
  copy_bytes(operation.sum, operation.addends.data(), bytes);
  for (size_t rank = 1; rank < operation.parts.size(); ++rank) {
    reduce_into(operation.sum, operation.addends.data() + static_cast<int64_t>(rank) * bytes, bytes,
                operation.dtype, operation.reduce);
  }
  operation.reduced = true;
}

Channel partner_channel(Channel mine) {
  switch (mine) {
    case Channel::kSend:
      return Channel::kRecv;
    case Channel::kRecv:
      return Channel::kSend;
    default:
      return Channel::kCollective;
  }
}

}  // namespace conclave::inline v0::comm

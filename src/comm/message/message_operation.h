// One operation of one rank: what goes to each peer and comes from it.
#pragma once

#include "comm/agreement.h"
#include "comm/message/wire.h"

#include "conclave/comm.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace conclave::inline v0::comm {

// Bytes between this rank and a peer, both ways.
struct Lane {
  const std::byte* from = nullptr;
  int64_t out_bytes = 0;
  int64_t sent = 0;
  std::byte* to = nullptr;
  int64_t in_bytes = 0;
  int64_t received = 0;

  bool complete() const { return sent == out_bytes && received == in_bytes; }
};

// A reduction of a long vector takes two rounds: each rank adds up one block, then all get it.
inline constexpr size_t kRounds = 2;

struct PeerPart {
  bool involved = false;
  bool matched = false;  // the peer has announced the same
  Claim claim;           // what this rank says to the peer
  std::array<Lane, kRounds> lanes;

  bool complete() const {
    return !involved || (matched && lanes[0].complete() && lanes[1].complete());
  }
};

struct MessageOperation {
  uint64_t sequence = 0;  // its handle's; 0: this entry is free
  Channel channel = Channel::kCollective;
  uint64_t number = 0;  // counts the operations of the channel, messages for each peer
  CommKind kind = CommKind::kBarrier;
  int32_t peer = -1;
  bool in_background = false;
  std::vector<PeerPart> parts;  // [ranks]

  DType dtype = DType::kU8;
  ReduceOp reduce = ReduceOp::kSum;
  std::vector<std::byte> addends;  // this rank's block of every rank's vector, in rank order
  std::byte* sum = nullptr;        // where their sum goes
  int64_t sum_bytes = 0;
  bool reduced = true;  // false until `sum` is there

  bool in_use() const { return sequence != 0; }
};

// Fills an entry from what begin has checked, for rank `me` of `ranks`. Entries are used again, so
// that their vectors grow with the largest operation only.
void describe(const CommOperation& from, int32_t me, int32_t ranks, MessageOperation& to);
bool is_complete(const MessageOperation& operation);
// True if round 0 has brought all addends, and they are still to be added.
bool can_reduce(const MessageOperation& operation);
// Adds in rank order, so that every rank gets the same bits.
void add_up(MessageOperation& operation);

// The channel under which the other rank counts the same operation.
Channel partner_channel(Channel mine);

inline const PeerPart& part_of(const MessageOperation& operation, int32_t peer) {
  return operation.parts[static_cast<size_t>(peer)];
}

}  // namespace conclave::inline v0::comm

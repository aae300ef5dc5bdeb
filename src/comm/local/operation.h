// Operations under way in a local group, and whether two ranks mean the same one.
#pragma once

#include "comm/agreement.h"

#include "conclave/comm.h"
#include "conclave/dtype.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::comm {

// Any thread of the group may move a block; kMoving tells the others that one is at it.
enum class Progress : uint8_t { kOpen, kMoving, kDone };

// One operation of one rank, from begin to the end of wait.
struct Operation {
  uint64_t sequence = 0;  // its handle's; 0: this entry is free
  // Its rank gave up during it. Peers still compare it with theirs: who disagrees is to blame.
  bool withdrawn = false;
  CommKind kind = CommKind::kBarrier;
  uint64_t number = 0;  // counts the rank's collectives, or the messages between two ranks
  int32_t peer = -1;    // the other rank of a message
  DType dtype = DType::kU8;
  ReduceOp reduce = ReduceOp::kSum;
  const std::byte* send = nullptr;
  std::byte* recv = nullptr;
  int64_t send_bytes = 0;  // the whole buffer; kAllToAllV has the vectors instead
  int64_t recv_bytes = 0;

  std::vector<int64_t> send_counts, send_offsets, recv_counts, recv_offsets;  // [ranks]
  std::vector<Progress> taken;       // [ranks] what this rank needs from the peer
  std::vector<uint8_t> acked;        // [ranks] the peer has all it needs from this rank
  std::vector<Operation*> partners;  // [ranks] scratch for a reduction

  bool in_use() const { return sequence != 0; }
};

// The bytes that `from`, an operation of its rank, offers to rank `to`.
struct Block {
  const std::byte* data = nullptr;
  int64_t bytes = 0;
};
Block block_for(const Operation& from, int32_t to);

// The place where a rank puts data from rank `from`. Not for reductions.
std::byte* destination_of(const Operation& mine, int32_t from);

// The reason why `theirs`, found where rank `me` looked for the partner of `mine`, is not that
// partner.
std::optional<std::string> disagreement(const Operation& mine, int32_t me, const Operation& theirs,
                                        int32_t peer);

}  // namespace conclave::inline v0::comm

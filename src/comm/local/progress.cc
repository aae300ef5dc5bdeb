#include "comm/local/progress.h"

#include "comm/reduce.h"

#include <cstring>

namespace conclave::inline v0::comm {
namespace {

void finish_pair(LocalGroup& group, Operation& mine, int32_t rank, Operation& theirs,
                 int32_t peer) {
  mine.taken[static_cast<size_t>(peer)] = Progress::kDone;
  theirs.acked[static_cast<size_t>(rank)] = 1;
  group.changed.notify_all();
}

bool is_partner(const Operation& theirs, const Operation& mine, int32_t rank) {
  if (theirs.number != mine.number) return false;
  if (is_collective(mine.kind)) return is_collective(theirs.kind);
  const CommKind wanted = mine.kind == CommKind::kSend ? CommKind::kRecv : CommKind::kSend;
  return theirs.kind == wanted && theirs.peer == rank;
}

bool is_active(LocalGroup& group, int32_t rank) {
  return group.rank(rank).standing == Standing::kActive;
}

bool take_block(LocalGroup& group, Operation& mine, int32_t rank, int32_t peer, GroupLock& lock) {
  Progress& progress = mine.taken[static_cast<size_t>(peer)];
  if (progress != Progress::kOpen || !is_active(group, peer)) return false;
  Operation* const theirs = partner_of(group, mine, rank, peer);
  if (theirs == nullptr || disagreement(mine, rank, *theirs, peer)) return false;
  const Block block = block_for(*theirs, rank);
  if (block.bytes > 0) {
    std::byte* const destination = destination_of(mine, peer);
    progress = Progress::kMoving;
    ++group.rank(rank).users;
    ++group.rank(peer).users;
    lock.unlock();
    std::memcpy(destination, block.data, static_cast<size_t>(block.bytes));
    lock.lock();
    --group.rank(rank).users;
    --group.rank(peer).users;
  }
  finish_pair(group, mine, rank, *theirs, peer);
  return true;
}

// Finds the operations that a reduction adds up. False unless all are there and mean the same.
bool find_partners(LocalGroup& group, Operation& mine, int32_t rank) {
  for (int32_t peer = 0; peer < group.size(); ++peer) {
    Operation* const theirs = partner_of(group, mine, rank, peer);
    if (theirs == nullptr || !is_active(group, peer)) return false;
    if (disagreement(mine, rank, *theirs, peer)) return false;
    mine.partners[static_cast<size_t>(peer)] = theirs;
  }
  return true;
}

bool take_reduction(LocalGroup& group, Operation& mine, int32_t rank, GroupLock& lock) {
  if (mine.taken[static_cast<size_t>(rank)] != Progress::kOpen) return false;
  if (!find_partners(group, mine, rank)) return false;
  for (Progress& progress : mine.taken) progress = Progress::kMoving;
  for (RankState& state : group.ranks) ++state.users;
  lock.unlock();
  // The sum runs in rank order, whoever computes it: every rank gets the same bits.
  const int64_t offset =
      mine.kind == CommKind::kReduceScatter ? rank * mine.recv_bytes : int64_t{0};
  if (mine.recv_bytes > 0) {
    std::memcpy(mine.recv, mine.partners[0]->send + offset, static_cast<size_t>(mine.recv_bytes));
    for (size_t peer = 1; peer < mine.partners.size(); ++peer) {
      reduce_into(mine.recv, mine.partners[peer]->send + offset, mine.recv_bytes, mine.dtype,
                  mine.reduce);
    }
  }
  lock.lock();
  for (RankState& state : group.ranks) --state.users;
  for (int32_t peer = 0; peer < group.size(); ++peer) {
    finish_pair(group, mine, rank, *mine.partners[static_cast<size_t>(peer)], peer);
  }
  return true;
}

}  // namespace

Operation* partner_of(LocalGroup& group, const Operation& mine, int32_t rank, int32_t peer) {
  for (Operation& theirs : group.rank(peer).operations) {
    if (theirs.in_use() && is_partner(theirs, mine, rank)) return &theirs;
  }
  return nullptr;
}

const Operation* counterpart_of(LocalGroup& group, const Operation& mine, int32_t rank,
                                int32_t peer) {
  for (const Operation& theirs : group.rank(peer).operations) {
    if ((theirs.in_use() || theirs.withdrawn) && is_partner(theirs, mine, rank)) return &theirs;
  }
  return nullptr;
}

bool take(LocalGroup& group, Operation& mine, int32_t rank, GroupLock& lock) {
  if (!is_active(group, rank) || mine.kind == CommKind::kSend) return false;
  if (mine.kind == CommKind::kRecv) return take_block(group, mine, rank, mine.peer, lock);
  if (is_reduction(mine.kind)) return take_reduction(group, mine, rank, lock);
  bool moved = false;
  for (int32_t step = 0; step < group.size(); ++step) {
    // Each rank begins with itself, so that the ranks do not all read from the same one.
    if (take_block(group, mine, rank, (rank + step) % group.size(), lock)) moved = true;
  }
  return moved;
}

void move_all(LocalGroup& group, Operation& mine, int32_t rank, GroupLock& lock) {
  take(group, mine, rank, lock);
  for (int32_t step = 1; step <= group.size(); ++step) {
    const int32_t peer = (rank + step) % group.size();
    if (!is_collective(mine.kind) && peer != mine.peer) continue;
    Operation* const theirs = partner_of(group, mine, rank, peer);
    if (theirs == nullptr || theirs == &mine || !is_active(group, peer)) continue;
    if (is_reduction(theirs->kind)) {
      take_reduction(group, *theirs, peer, lock);
    } else if (theirs->kind != CommKind::kSend) {
      take_block(group, *theirs, peer, rank, lock);
    }
  }
}

}  // namespace conclave::inline v0::comm

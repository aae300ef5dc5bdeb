#include "comm/local/local_communicator.h"

#include "comm/reduce.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

using Clock = std::chrono::steady_clock;

Clock::time_point time_after(std::chrono::nanoseconds deadline) {
  const Clock::time_point now = Clock::now();
  return deadline >= Clock::time_point::max() - now ? Clock::time_point::max() : now + deadline;
}

}  // namespace

LocalCommunicator::LocalCommunicator(std::shared_ptr<LocalGroup> group, int32_t rank,
                                     std::chrono::nanoseconds timeout)
    : group_(std::move(group)),
      rank_(rank),
      timeout_(timeout),
      sends_(group_->ranks.size(), 0),
      receives_(group_->ranks.size(), 0) {}

LocalCommunicator::~LocalCommunicator() {
  Lock lock(group_->mutex);
  if (self().standing == Standing::kActive) self().standing = Standing::kGone;
  withdraw(lock);
}

void LocalCommunicator::wait(CommHandle handle, std::chrono::nanoseconds deadline,
                             std::string_view phase) {
  const Clock::time_point until = time_after(deadline);
  Lock lock(group_->mutex);
  check_usable(phase);
  const auto mine =
      std::find_if(self().operations.begin(), self().operations.end(),
                   [&](const Operation& o) { return o.in_use() && o.sequence == handle.sequence; });
  if (mine == self().operations.end()) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "no operation of this handle is under way",
                                              .tensor = "handle",
                                              .found = std::to_string(handle.sequence)});
  }
  bool expired = false;
  while (true) {
    const bool moved = progress_all(lock, phase);
    if (complete(*mine)) {
      mine->sequence = 0;
      return;
    }
    if (group_->aborted_by >= 0) {
      fail(ErrorCode::kCommAborted, group_->aborted_by, phase, group_->abort_reason.data(), lock);
    }
    check_peers(*mine, lock, phase);
    if (moved) continue;
    if (expired) time_out(*mine, deadline, lock, phase);
    expired = group_->changed.wait_until(lock, until) == std::cv_status::timeout;
  }
}

void LocalCommunicator::abort(std::string_view reason) noexcept {
  const Lock lock(group_->mutex);
  if (group_->aborted_by >= 0) return;
  group_->aborted_by = rank_;
  const size_t length = std::min(reason.size(), group_->abort_reason.size() - 1);
  std::copy_n(reason.begin(), length, group_->abort_reason.begin());
  group_->changed.notify_all();
}

Operation* LocalCommunicator::partner_of(const Operation& mine, int32_t peer) {
  for (Operation& theirs : state_of(peer).operations) {
    if (!theirs.in_use() || theirs.number != mine.number) continue;
    const bool matches = is_collective(mine.kind)
                             ? is_collective(theirs.kind)
                             : theirs.kind == OperationKind::kSend && theirs.peer == rank_;
    if (matches) return &theirs;
  }
  return nullptr;
}

bool LocalCommunicator::progress_all(Lock& lock, std::string_view phase) {
  bool moved = false;
  for (Operation& mine : self().operations) {
    if (mine.in_use() && progress(mine, lock, phase)) moved = true;
  }
  return moved;
}

bool LocalCommunicator::progress(Operation& mine, Lock& lock, std::string_view phase) {
  if (mine.kind == OperationKind::kSend) return false;  // the receiver does the work
  if (mine.kind == OperationKind::kRecv) return take_from(mine, mine.peer, lock, phase);
  if (is_reduction(mine.kind)) return reduce_all(mine, lock, phase);
  bool moved = false;
  for (int32_t step = 0; step < size(); ++step) {
    // Each rank begins with itself, so that the ranks do not all read from the same one.
    const int32_t peer = (rank_ + step) % size();
    if (take_from(mine, peer, lock, phase)) moved = true;
  }
  return moved;
}

bool LocalCommunicator::take_from(Operation& mine, int32_t peer, Lock& lock,
                                  std::string_view phase) {
  if (mine.taken[static_cast<size_t>(peer)] != 0) return false;
  Operation* const theirs = partner_of(mine, peer);
  if (theirs == nullptr) return false;
  if (auto why = disagreement(mine, rank_, *theirs, peer)) {
    fail(ErrorCode::kCommMismatch, peer, phase, std::move(*why), lock);
  }
  const Block block = block_for(*theirs, rank_);
  if (block.bytes > 0) {
    std::byte* const destination = destination_of(mine, peer);
    ++state_of(peer).readers;
    lock.unlock();
    std::memcpy(destination, block.data, static_cast<size_t>(block.bytes));
    lock.lock();
    --state_of(peer).readers;
  }
  acknowledge(mine, *theirs, peer);
  return true;
}

bool LocalCommunicator::reduce_all(Operation& mine, Lock& lock, std::string_view phase) {
  if (mine.taken[static_cast<size_t>(rank_)] != 0) return false;
  bool all_posted = true;
  for (int32_t peer = 0; peer < size(); ++peer) {
    Operation* const theirs = partner_of(mine, peer);
    all_posted = all_posted && theirs != nullptr;
    if (theirs == nullptr) continue;
    mine.partners[static_cast<size_t>(peer)] = theirs;
    if (auto why = disagreement(mine, rank_, *theirs, peer)) {
      fail(ErrorCode::kCommMismatch, peer, phase, std::move(*why), lock);
    }
  }
  if (!all_posted) return false;

  for (RankState& state : group_->ranks) ++state.readers;
  lock.unlock();
  // The sum runs in rank order, whoever computes it: every rank gets the same bits.
  const int64_t offset =
      mine.kind == OperationKind::kReduceScatter ? rank_ * mine.recv_bytes : int64_t{0};
  if (mine.recv_bytes > 0) {
    std::memcpy(mine.recv, mine.partners[0]->send + offset, static_cast<size_t>(mine.recv_bytes));
    for (size_t peer = 1; peer < mine.partners.size(); ++peer) {
      reduce_into(mine.recv, mine.partners[peer]->send + offset, mine.recv_bytes, mine.dtype,
                  mine.reduce);
    }
  }
  lock.lock();
  for (RankState& state : group_->ranks) --state.readers;
  for (int32_t peer = 0; peer < size(); ++peer) {
    acknowledge(mine, *mine.partners[static_cast<size_t>(peer)], peer);
  }
  return true;
}

void LocalCommunicator::acknowledge(Operation& mine, Operation& theirs, int32_t peer) {
  mine.taken[static_cast<size_t>(peer)] = 1;
  theirs.acked[static_cast<size_t>(rank_)] = 1;
  group_->changed.notify_all();
}

bool LocalCommunicator::needs(const Operation& mine, int32_t peer) const {
  const auto at = static_cast<size_t>(peer);
  if (mine.kind == OperationKind::kSend) return peer == mine.peer && mine.acked[at] == 0;
  if (mine.kind == OperationKind::kRecv) return peer == mine.peer && mine.taken[at] == 0;
  return mine.taken[at] == 0 || mine.acked[at] == 0;
}

bool LocalCommunicator::complete(const Operation& mine) const {
  for (int32_t peer = 0; peer < size(); ++peer) {
    if (needs(mine, peer)) return false;
  }
  return true;
}

void LocalCommunicator::check_peers(const Operation& mine, Lock& lock, std::string_view phase) {
  for (int32_t peer = 0; peer < size(); ++peer) {
    const RankState& state = state_of(peer);
    if (peer == rank_ || state.standing == Standing::kActive || !needs(mine, peer)) continue;
    if (state.standing == Standing::kGone) {
      fail(ErrorCode::kCommPeerLost, peer, phase,
           fmt::format("rank {} was destroyed during {}", peer, to_string(mine.kind)), lock);
    }
    // Every survivor names the rank that caused the first failure, not the one that passed it on.
    const int32_t culprit = state.culprit == rank_ || state.culprit < 0 ? peer : state.culprit;
    fail(state.failure, culprit, phase, fmt::format("rank {} gave up: {}", peer, state.reason),
         lock);
  }
}

void LocalCommunicator::time_out(const Operation& mine, std::chrono::nanoseconds deadline,
                                 Lock& lock, std::string_view phase) {
  int32_t late = 0;
  while (late < size() - 1 && !needs(mine, late)) ++late;
  for (int32_t peer = 0; peer < size(); ++peer) {
    // A rank that never arrived is to blame before one that waits for it.
    if (needs(mine, peer) && mine.kind != OperationKind::kSend &&
        partner_of(mine, peer) == nullptr) {
      late = peer;
      break;
    }
  }
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(deadline);
  fail(ErrorCode::kCommTimeout, late, phase,
       fmt::format("rank {} did not complete {} within {} ms", late, to_string(mine.kind),
                   waited.count()),
       lock);
}

void LocalCommunicator::fail(ErrorCode code, int32_t peer, std::string_view phase, std::string what,
                             Lock& lock) {
  self().standing = Standing::kFailed;
  self().failure = code;
  self().culprit = peer;
  self().reason = what;
  withdraw(lock);
  throw CommError(code, peer, std::string(phase), std::move(what));
}

void LocalCommunicator::withdraw(Lock& lock) {
  group_->changed.notify_all();
  group_->changed.wait(lock, [this] { return self().readers == 0; });
  for (Operation& operation : self().operations) operation.sequence = 0;
}

bool LocalCommunicator::usable() {
  return group_->aborted_by < 0 && self().standing == Standing::kActive;
}

void LocalCommunicator::check_usable(std::string_view phase) {
  if (group_->aborted_by >= 0) {
    throw CommError(ErrorCode::kCommAborted, group_->aborted_by, std::string(phase),
                    group_->abort_reason.data());
  }
  if (self().standing == Standing::kFailed) {
    throw CommError(self().failure, self().culprit, std::string(phase),
                    "this communicator has failed before and is unusable");
  }
}

}  // namespace conclave::inline v0::comm

#include "comm/local/local_communicator.h"

#include "comm/deadline.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

using Clock = std::chrono::steady_clock;

bool needs(const Operation& mine, int32_t peer) {
  const auto at = static_cast<size_t>(peer);
  if (mine.kind == CommKind::kSend) return peer == mine.peer && mine.acked[at] == 0;
  if (mine.kind == CommKind::kRecv) return peer == mine.peer && mine.taken[at] != Progress::kDone;
  return mine.taken[at] != Progress::kDone || mine.acked[at] == 0;
}

bool complete(const Operation& mine) {
  for (size_t peer = 0; peer < mine.taken.size(); ++peer) {
    if (needs(mine, static_cast<int32_t>(peer))) return false;
  }
  return true;
}

void describe(const CommOperation& from, Operation& to) {
  to.kind = from.kind;
  to.peer = from.peer;
  to.dtype = from.dtype;
  to.reduce = from.reduce;
  to.send = from.send.data();
  to.recv = from.recv.data();
  to.send_bytes = from.send.size();
  to.recv_bytes = from.recv.size();
  if (from.kind != CommKind::kAllToAllV) return;
  const AllToAllV& exchange = from.exchange;
  to.send = exchange.send;
  to.recv = exchange.recv;
  to.send_counts.assign(exchange.send_bytes.begin(), exchange.send_bytes.end());
  to.send_offsets.assign(exchange.send_offsets.begin(), exchange.send_offsets.end());
  to.recv_counts.assign(exchange.recv_bytes.begin(), exchange.recv_bytes.end());
  to.recv_offsets.assign(exchange.recv_offsets.begin(), exchange.recv_offsets.end());
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
  GroupLock lock(group_->mutex);
  if (self().standing == Standing::kActive) self().standing = Standing::kGone;
  self().left = true;
  withdraw(lock);
}

Support LocalCommunicator::supports(CommFeature feature) const {
  switch (feature) {
    case CommFeature::kHostMemory:
    case CommFeature::kOverlap:
    case CommFeature::kShrink:
      return Support::yes();
    case CommFeature::kPeerMemory:
      return Support::no("ranks of the communicator local keep their memory to themselves");
    default:
      return Communicator::supports(feature);
  }
}

CommHandle LocalCommunicator::start(const CommOperation& operation) {
  GroupLock lock(group_->mutex);
  if (!usable()) return {next_sequence_++};
  Operation& mine = take_entry();
  describe(operation, mine);
  const CommHandle handle = publish(mine);
  move_all(*group_, mine, rank_, lock);
  return handle;
}

Operation& LocalCommunicator::take_entry() {
  auto& operations = self().operations;
  const auto free = std::find_if(operations.begin(), operations.end(),
                                 [](const Operation& o) { return !o.in_use(); });
  if (free == operations.end()) {
    throw Error(ErrorCode::kState, {.what = "too many operations are begun and not waited for",
                                    .found = std::to_string(operations.size()),
                                    .limit = std::to_string(kMaxOperations)});
  }
  const size_t ranks = group_->ranks.size();
  // These grow once per entry; entries are reused lowest first, so later calls do not allocate.
  free->taken.assign(ranks, Progress::kOpen);
  free->acked.assign(ranks, 0);
  free->partners.assign(ranks, nullptr);
  return *free;
}

CommHandle LocalCommunicator::publish(Operation& operation) {
  switch (operation.kind) {
    case CommKind::kSend:
      operation.number = sends_[static_cast<size_t>(operation.peer)]++;
      break;
    case CommKind::kRecv:
      operation.number = receives_[static_cast<size_t>(operation.peer)]++;
      break;
    default:
      operation.number = collectives_++;
      break;
  }
  operation.sequence = next_sequence_++;
  group_->changed.notify_all();
  return {operation.sequence};
}

Operation& LocalCommunicator::operation_of(CommHandle handle, GroupLock& lock,
                                           std::string_view phase) {
  const auto mine =
      std::find_if(self().operations.begin(), self().operations.end(),
                   [&](const Operation& o) { return o.in_use() && o.sequence == handle.sequence; });
  if (mine != self().operations.end()) return *mine;
  check_usable(lock, phase);
  throw Error(ErrorCode::kInvalidArgument, {.what = "no operation of this handle is under way",
                                            .tensor = "handle",
                                            .found = std::to_string(handle.sequence)});
}

void LocalCommunicator::wait(CommHandle handle, std::chrono::nanoseconds deadline,
                             std::string_view phase) {
  const Clock::time_point until = time_after(deadline);
  GroupLock lock(group_->mutex);
  Operation& mine = operation_of(handle, lock, phase);
  bool expired = false;
  while (!complete(mine)) {
    if (advance(mine, lock, phase) || complete(mine)) continue;
    if (expired) time_out(mine, deadline, lock, phase);
    expired = group_->changed.wait_until(lock, until) == std::cv_status::timeout;
  }
  mine.sequence = 0;
}

bool LocalCommunicator::test(CommHandle handle, std::string_view phase) {
  GroupLock lock(group_->mutex);
  const Operation& mine = operation_of(handle, lock, phase);
  if (!complete(mine)) advance(mine, lock, phase);
  return complete(mine);
}

void LocalCommunicator::check(std::string_view phase) {
  GroupLock lock(group_->mutex);
  check_usable(lock, phase);
}

void LocalCommunicator::abort(std::string_view reason) noexcept {
  const GroupLock lock(group_->mutex);
  if (group_->aborted_by >= 0) return;
  group_->aborted_by = rank_;
  const size_t length = std::min(reason.size(), group_->abort_reason.size() - 1);
  std::copy_n(reason.begin(), length, group_->abort_reason.begin());
  group_->changed.notify_all();
}

bool LocalCommunicator::advance(const Operation& mine, GroupLock& lock, std::string_view phase) {
  bool moved = false;
  for (Operation& operation : self().operations) {
    if (!operation.in_use()) continue;
    check_agreement(operation, lock, phase);
    if (take(*group_, operation, rank_, lock)) moved = true;
  }
  if (complete(mine)) return moved;
  if (group_->aborted_by >= 0) {
    // A peer may be moving the last bytes: an operation that all have begun is not lost.
    group_->changed.wait(lock, [this] { return self().users == 0; });
    if (complete(mine)) return true;
    fail(ErrorCode::kCommAborted, group_->aborted_by, phase, group_->abort_reason.data(), lock);
  }
  check_peers(mine, lock, phase);
  return moved;
}

// A sender has nothing to compare: its receiver looks at both sides.
void LocalCommunicator::check_agreement(const Operation& mine, GroupLock& lock,
                                        std::string_view phase) {
  if (mine.kind == CommKind::kSend) return;
  for (int32_t peer = 0; peer < size(); ++peer) {
    if (mine.kind == CommKind::kRecv && peer != mine.peer) continue;
    if (mine.taken[static_cast<size_t>(peer)] != Progress::kOpen) continue;
    const Operation* const theirs = counterpart_of(*group_, mine, rank_, peer);
    if (theirs == nullptr) continue;
    if (auto why = disagreement(mine, rank_, *theirs, peer)) {
      fail(ErrorCode::kCommMismatch, peer, phase, std::move(*why), lock);
    }
  }
}

void LocalCommunicator::check_peers(const Operation& mine, GroupLock& lock,
                                    std::string_view phase) {
  for (int32_t peer = 0; peer < size(); ++peer) {
    const RankState& state = group_->rank(peer);
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
                                 GroupLock& lock, std::string_view phase) {
  int32_t late = 0;
  while (late < size() - 1 && !needs(mine, late)) ++late;
  for (int32_t peer = 0; peer < size(); ++peer) {
    // A rank that never arrived is to blame before one that waits for it.
    if (needs(mine, peer) && partner_of(*group_, mine, rank_, peer) == nullptr) {
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
                             GroupLock& lock) {
  self().standing = Standing::kFailed;
  self().failure = code;
  self().culprit = peer;
  self().reason = what;
  withdraw(lock);
  throw CommError(code, peer, std::string(phase), std::move(what));
}

void LocalCommunicator::withdraw(GroupLock& lock) {
  group_->changed.notify_all();
  group_->changed.wait(lock, [this] { return self().users == 0; });
  for (Operation& operation : self().operations) {
    operation.withdrawn = operation.withdrawn || operation.in_use();
    operation.sequence = 0;
  }
}

bool LocalCommunicator::usable() {
  return group_->aborted_by < 0 && self().standing == Standing::kActive;
}

void LocalCommunicator::check_usable(GroupLock& lock, std::string_view phase) {
  if (group_->aborted_by >= 0) {
    if (self().standing == Standing::kActive) {
      fail(ErrorCode::kCommAborted, group_->aborted_by, phase, group_->abort_reason.data(), lock);
    }
    throw CommError(ErrorCode::kCommAborted, group_->aborted_by, std::string(phase),
                    group_->abort_reason.data());
  }
  if (self().standing == Standing::kFailed) {
    throw CommError(self().failure, self().culprit, std::string(phase),
                    "this communicator has failed before and is unusable");
  }
}

}  // namespace conclave::inline v0::comm

namespace conclave::inline v0 {
namespace {

// Each rank counts its messages with each other one: 256 MiB in all for so many.
constexpr int32_t kMostRanks = 4096;

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_local_group(const LocalGroupOptions& options) {
  if (options.num_ranks < 1 || options.num_ranks > kMostRanks) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "a local group cannot have so many ranks",
                                              .tensor = "num_ranks",
                                              .expected = fmt::format("1 to {}", kMostRanks),
                                              .found = std::to_string(options.num_ranks)});
  }
  auto group = std::make_shared<comm::LocalGroup>();
  group->ranks.resize(static_cast<size_t>(options.num_ranks));
  std::vector<std::unique_ptr<Communicator>> communicators;
  communicators.reserve(group->ranks.size());
  for (int32_t rank = 0; rank < options.num_ranks; ++rank) {
    communicators.push_back(
        std::make_unique<comm::LocalCommunicator>(group, rank, options.timeout));
  }
  return communicators;
}

}  // namespace conclave::inline v0

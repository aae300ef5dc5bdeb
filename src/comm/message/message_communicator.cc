#include "comm/message/message_communicator.h"

#include "comm/deadline.h"
#include "comm/message/pause.h"
#include "comm/message/process_watch.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using Clock = std::chrono::steady_clock;

constexpr std::string_view kConnectPhase = "connect";
constexpr size_t kMaxOperations = 64;  // under way per rank
// For messages that are on their way when this rank leaves: peers may need them, and after a
// failure some peer may never take its own.
constexpr auto kFlushTime = 2s;
constexpr auto kFlushTimeAfterFailure = 20ms;
// For a peer's word on who is late.
constexpr std::chrono::nanoseconds kAccusationTime = 200ms;

std::chrono::nanoseconds with_accusation_time(std::chrono::nanoseconds deadline) {
  const std::chrono::nanoseconds more = std::min(deadline, kAccusationTime);
  return deadline > std::chrono::nanoseconds::max() - more ? deadline : deadline + more;
}

int64_t missing_peers(const MessageOperation& operation) {
  return std::count_if(operation.parts.begin(), operation.parts.end(),
                       [](const PeerPart& part) { return !part.complete(); });
}

// A rank that waits moves its own bytes.
class WaitingRank {
 public:
  explicit WaitingRank(bool& flag) : flag_(flag) { flag_ = true; }
  WaitingRank(const WaitingRank&) = delete;
  WaitingRank& operator=(const WaitingRank&) = delete;
  ~WaitingRank() { flag_ = false; }

 private:
  bool& flag_;
};

}  // namespace

MessageCommunicator::MessageCommunicator(std::unique_ptr<MessagePort> port,
                                         std::chrono::nanoseconds timeout,
                                         std::shared_ptr<VerdictPlace> place)
    : port_(std::move(port)),
      timeout_(timeout),
      self_(this_process()),
      peers_(static_cast<size_t>(port_->size())),
      members_(peers_.size()),
      place_(std::move(place)) {
  std::iota(members_.begin(), members_.end(), 0);
  prepare_verdict();
}

MessageCommunicator::MessageCommunicator(MessageSurvivor survivor, std::chrono::nanoseconds timeout)
    : port_(std::move(survivor.port)),
      timeout_(timeout),
      self_(survivor.identities[static_cast<size_t>(port_->rank())]),
      peers_(static_cast<size_t>(port_->size())),
      members_(std::move(survivor.members)),
      place_(std::move(survivor.place)) {
  for (size_t number = 0; number < peers_.size(); ++number) {
    peers_[number].met = true;
    peers_[number].identity = survivor.identities[number];
  }
  prepare_verdict();
}

MessageCommunicator::~MessageCommunicator() {
  MessagePort& port = *port_;
  // The child of a fork has nothing to say, may find the lock held for ever, and has no thread.
  if (port.is_inherited()) {
    static_cast<void>(background_.release());
    port.retire(std::move(port_), {.orderly = false});
    return;
  }
  background_.reset();
  MessageLock lock(port.mutex());
  // A peer may hear that this rank has gone before it hears of the abort that ended it.
  if (aborted_by_ >= 0 && aborted_by_ != rank()) {
    say_farewell(NoticeKind::kAborted, ErrorCode::kCommAborted, aborted_by_, abort_reason_.data());
  }
  // Also after a failure: ranks that look for survivors need not wait for this one.
  say_farewell(NoticeKind::kGone, ErrorCode::kCommPeerLost, rank(), {});
  port.flush(usable() ? kFlushTime : kFlushTimeAfterFailure);
  const Leaving state = leaving();
  verdict_.reset();
  place_.reset();
  lock.unlock();
  port.retire(std::move(port_), state);
}

void MessageCommunicator::meet() {
  const Clock::time_point until = time_after(timeout_);
  MessageLock lock(port_->mutex());
  try {
    const bool looks_for_place = place_ == nullptr && port_->supports_survivors();
    std::shared_ptr<SharedFile> file;
    if (rank() == 0 && looks_for_place) file = SharedFile::make(size());
    self_.shared_file = file ? file->descriptor() : -1;
    greet(NoticeKind::kHello);
    await_all(lock, until, &Peer::met);
    for (int32_t from = 0; from < size(); ++from) {
      if (peer(from).identity.build == self_.build) continue;
      fail(ErrorCode::kCommMismatch, from, kConnectPhase,
           fmt::format("rank {} has another version of this library", from));
    }
    if (!looks_for_place) return;
    share_file(std::move(file));
    greet(NoticeKind::kReady);
    await_all(lock, until, &Peer::ready);
    check_file_is_shared();
  } catch (const PortFailure& failure) {
    fail(ErrorCode::kCommPeerLost, failure.peer(), kConnectPhase, failure.what());
  }
}

void MessageCommunicator::greet(NoticeKind kind) {
  outgoing_.kind = kind;
  outgoing_.identity = self_;
  for (int32_t to = 0; to < size(); ++to) port_->post(to, outgoing_, 0);
}

void MessageCommunicator::await_all(MessageLock& lock, Clock::time_point until, bool Peer::*heard) {
  Pause pause(*port_);
  for (int32_t from = 0; from < size();) {
    read_notices();
    if (peer(from).*heard) {
      ++from;
      continue;
    }
    if (port_->is_cut_off(from)) {
      fail(ErrorCode::kCommPeerLost, from, kConnectPhase,
           fmt::format("the connection to rank {} ended before it was used", from));
    }
    if (Clock::now() >= until) {
      fail(ErrorCode::kCommTimeout, from, kConnectPhase,
           fmt::format("rank {} did not connect", from));
    }
    pause.without(lock);
  }
}

Support MessageCommunicator::supports(CommFeature feature) const {
  switch (feature) {
    case CommFeature::kHostMemory:
      return Support::yes();
    case CommFeature::kOverlap:
      return port_->takes_background();
    case CommFeature::kShrink:
      return shrink_support();
    default:
      return Communicator::supports(feature);
  }
}

CommHandle MessageCommunicator::start(const CommOperation& operation) {
  port_->check_caller();
  const MessageLock lock(port_->mutex());
  if (!usable()) return {next_sequence_++};
  MessageOperation& mine = take_entry();
  describe(operation, rank(), size(), mine);
  switch (operation.kind) {
    case CommKind::kSend:
      mine.channel = Channel::kSend;
      mine.number = peer(operation.peer).sends++;
      break;
    case CommKind::kRecv:
      mine.channel = Channel::kRecv;
      mine.number = peer(operation.peer).receives++;
      break;
    default:
      mine.channel = Channel::kCollective;
      mine.number = collectives_++;
      break;
  }
  mine.sequence = next_sequence_++;
  constexpr std::string_view kPhase = "begin";
  try {
    announce(mine);
  } catch (const PortFailure& failure) {
    fail(ErrorCode::kCommPeerLost, failure.peer(), kPhase, failure.what());
  }
  if (mine.in_background && is_long(mine)) wake_background();
  return {mine.sequence};
}

MessageOperation& MessageCommunicator::take_entry() {
  const auto free = std::find_if(operations_.begin(), operations_.end(),
                                 [](const MessageOperation& o) { return !o.in_use(); });
  if (free != operations_.end()) return *free;
  if (operations_.size() == kMaxOperations) {
    throw Error(ErrorCode::kState, {.what = "too many operations are begun and not waited for",
                                    .found = std::to_string(operations_.size()),
                                    .limit = std::to_string(kMaxOperations)});
  }
  return operations_.emplace_back();
}

void MessageCommunicator::announce(const MessageOperation& operation) {
  for (int32_t to = 0; to < size(); ++to) {
    const PeerPart& part = part_of(operation, to);
    if (!part.involved || (to == rank() && is_collective(operation.kind))) continue;
    outgoing_.kind = NoticeKind::kAnnounce;
    outgoing_.announcement = {.number = operation.number,
                              .offered = part.claim.offered,
                              .expected = part.claim.expected,
                              .channel = operation.channel,
                              .kind = operation.kind,
                              .dtype = operation.dtype,
                              .reduce = operation.reduce};
    const Lane& lane = part.lanes[0];
    const int64_t payload = is_inline(lane.out_bytes) ? lane.out_bytes : 0;
    std::copy_n(lane.from, payload, outgoing_.payload.begin());
    port_->post(to, outgoing_, static_cast<size_t>(payload));
  }
}

MessageOperation& MessageCommunicator::operation_of(CommHandle handle, std::string_view phase) {
  const auto mine = std::find_if(
      operations_.begin(), operations_.end(),
      [&](const MessageOperation& o) { return o.in_use() && o.sequence == handle.sequence; });
  if (mine != operations_.end()) return *mine;
  check_usable(phase);
  throw Error(ErrorCode::kInvalidArgument, {.what = "no operation of this handle is under way",
                                            .tensor = "handle",
                                            .found = std::to_string(handle.sequence)});
}

void MessageCommunicator::wait(CommHandle handle, std::chrono::nanoseconds deadline,
                               std::string_view phase) {
  port_->check_caller();
  const Clock::time_point until = time_after(deadline);
  // One of several missing peers may only wait for another: it is about to say so.
  const Clock::time_point last = time_after(with_accusation_time(deadline));
  MessageLock lock(port_->mutex());
  MessageOperation& mine = operation_of(handle, phase);
  const WaitingRank waiting(is_waiting_);
  Pause pause(*port_);
  while (true) {
    const bool expired = Clock::now() >= until;
    advance(phase);
    if (is_over(mine)) break;
    check_peers(mine, phase);
    if (expired && (Clock::now() >= last || missing_peers(mine) <= 1)) {
      time_out(mine, deadline, phase);
    }
    watch_processes(mine, phase);
    pause.without(lock);
  }
  mine.sequence = 0;
  if (has_background_work()) wake_background();
}

bool MessageCommunicator::test(CommHandle handle, std::string_view phase) {
  port_->check_caller();
  const MessageLock lock(port_->mutex());
  MessageOperation& mine = operation_of(handle, phase);
  advance(phase);
  if (is_over(mine)) return true;
  check_peers(mine, phase);
  watch_processes(mine, phase);
  return false;
}

void MessageCommunicator::advance(std::string_view phase) {
  send_pending_abort();
  try {
    read_notices();
    for (MessageOperation& operation : operations_) {
      if (operation.in_use()) move(operation, phase);
    }
    for (int32_t from = 0; from < size(); ++from) read_chunks(from);
    for (MessageOperation& operation : operations_) {
      if (operation.in_use()) move(operation, phase);
    }
  } catch (const PortFailure& failure) {
    fail(ErrorCode::kCommPeerLost, failure.peer(), phase, failure.what());
  }
}

}  // namespace conclave::inline v0::comm

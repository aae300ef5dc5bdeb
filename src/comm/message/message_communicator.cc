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
// Between a process's end and the moment at which nothing more of it can be on the way.
constexpr auto kLastBytes = 100ms;

const PeerPart& part_of(const MessageOperation& operation, int32_t peer) {
  return operation.parts[static_cast<size_t>(peer)];
}

std::chrono::nanoseconds with_accusation_time(std::chrono::nanoseconds deadline) {
  const std::chrono::nanoseconds more = std::min(deadline, kAccusationTime);
  return deadline > std::chrono::nanoseconds::max() - more ? deadline : deadline + more;
}

int64_t missing_peers(const MessageOperation& operation) {
  return std::count_if(operation.parts.begin(), operation.parts.end(),
                       [](const PeerPart& part) { return !part.complete(); });
}

uint64_t chunks_of(int64_t bytes) {
  return static_cast<uint64_t>((bytes + kChunkBytes - 1) / kChunkBytes);
}

// These go with the announcement.
bool is_inline(int64_t bytes) { return bytes <= kInlineBytes; }

void copy_reason(std::string_view reason, std::array<char, 256>& to) {
  const size_t length = std::min(reason.size(), to.size() - 1);
  std::copy_n(reason.begin(), length, to.begin());
  to[length] = '\0';
}

// Ranks that disagree, or are told to stop, are there; others may never come to their end.
bool means_a_missing_rank(ErrorCode code) {
  return code == ErrorCode::kCommTimeout || code == ErrorCode::kCommPeerLost;
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

Leaving MessageCommunicator::leaving() const {
  Leaving state{.orderly = usable(),
                .rank_is_missing = some_are_missing_ || (standing_ == Standing::kFailed &&
                                                         means_a_missing_rank(failure_)),
                .patience = timeout_,
                .has_gone_on = has_gone_on_};
  for (const Peer& other : peers_) {
    state.staying += other.left ? 0 : 1;
    // Survivors are being looked for, and this rank will not be among them.
    state.rank_is_missing |= other.present && !has_gone_on_;
    if (other.standing != Standing::kFailed) continue;
    state.orderly = false;
    state.rank_is_missing |= means_a_missing_rank(other.farewell.code);
  }
  return state;
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

void MessageCommunicator::check(std::string_view phase) {
  port_->check_caller();
  const MessageLock lock(port_->mutex());
  if (usable()) advance(phase);
  check_usable(phase);
}

void MessageCommunicator::abort(std::string_view reason) noexcept {
  if (port_->is_inherited()) return;
  const MessageLock lock(port_->mutex());
  if (port_->may_call()) hear_of_abort();
  if (aborted_by_ >= 0) return;
  aborted_by_ = rank();
  copy_reason(reason, abort_reason_);
  abort_to_send_ = true;
  if (!port_->may_call()) return;
  abort_to_send_ = false;
  say_farewell(NoticeKind::kAborted, ErrorCode::kCommAborted, rank(), reason);
}

// The first abort counts, which may have come and not been read.
void MessageCommunicator::hear_of_abort() noexcept {
  try {
    read_notices();
  } catch (const std::exception&) {
    return;  // a wait will say so
  }
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

void MessageCommunicator::send_pending_abort() noexcept {
  if (!abort_to_send_) return;
  abort_to_send_ = false;
  say_farewell(NoticeKind::kAborted, ErrorCode::kCommAborted, rank(), abort_reason_.data());
}

void MessageCommunicator::read_notices() {
  while (const auto received = port_->take_notice()) read(received->peer, *received->notice);
}

void MessageCommunicator::read(int32_t from, const Notice& notice) {
  Peer& sender = peer(from);
  switch (notice.kind) {
    case NoticeKind::kHello:
      sender.met = true;
      sender.identity = notice.identity;
      return;
    case NoticeKind::kReady:
      sender.ready = true;
      sender.identity = notice.identity;
      return;
    case NoticeKind::kPresent:
      sender.present = true;
      return;
    case NoticeKind::kAnnounce: {
      const auto free = std::find_if(sender.arrivals.begin(), sender.arrivals.end(),
                                     [](const Arrival& a) { return !a.waiting; });
      Arrival& arrival = free == sender.arrivals.end() ? sender.arrivals.emplace_back() : *free;
      arrival.waiting = true;
      arrival.notice = notice;
      return;
    }
    case NoticeKind::kAborted:
      if (aborted_by_ >= 0) return;
      aborted_by_ = is_rank(notice.farewell.culprit) ? notice.farewell.culprit : from;
      abort_reason_ = notice.farewell.reason;
      return;
    case NoticeKind::kGone:
    case NoticeKind::kFailed:
      sender.left = sender.left || notice.kind == NoticeKind::kGone;
      // Peers report why it failed, not that it left afterwards.
      if (sender.standing != Standing::kActive) return;
      sender.standing = notice.kind == NoticeKind::kGone ? Standing::kGone : Standing::kFailed;
      sender.farewell = notice.farewell;
      return;
  }
}

void MessageCommunicator::read_chunks(int32_t from) {
  while (const auto chunk = port_->take_chunk(from)) {
    const ChunkHeader& header = chunk->header;
    const auto mine =
        std::find_if(operations_.begin(), operations_.end(), [&](MessageOperation& o) {
          return o.in_use() && o.channel == header.channel && o.number == header.number &&
                 (o.peer == from || is_collective(o.kind));
        });
    // A chunk comes only after both sides have agreed, so that its place is known.
    if (mine == operations_.end() || header.round >= kRounds) {
      throw PortFailure(fmt::format("rank {} sent bytes that nobody waits for", from), from);
    }
    Lane& lane = mine->parts[static_cast<size_t>(from)].lanes[header.round];
    if (header.bytes < 0 || header.offset != lane.received ||
        header.bytes > lane.in_bytes - lane.received) {
      throw PortFailure(fmt::format("rank {} sent more bytes than it offered", from), from);
    }
    std::copy_n(chunk->data, header.bytes, lane.to + header.offset);
    lane.received += header.bytes;
  }
}

void MessageCommunicator::move(MessageOperation& operation, std::string_view phase) {
  for (int32_t with = 0; with < size(); ++with) {
    PeerPart& part = operation.parts[static_cast<size_t>(with)];
    if (!part.involved) continue;
    if (!part.matched) match(operation, with, phase);
    if (part.matched) send_lanes(operation, with);
  }
  if (!can_reduce(operation)) return;
  add_up(operation);
  for (int32_t to = 0; to < size(); ++to) send_lanes(operation, to);
}

void MessageCommunicator::match(MessageOperation& operation, int32_t with, std::string_view phase) {
  PeerPart& part = operation.parts[static_cast<size_t>(with)];
  const auto agree = [&](const Claim& theirs) {
    auto why = disagreement(part.claim, rank(), theirs, with);
    if (!why) why = disagreement(theirs, with, part.claim, rank());
    if (why) fail(ErrorCode::kCommMismatch, with, phase, std::move(*why));
    part.matched = true;
  };
  if (with == rank() && is_collective(operation.kind)) return agree(part.claim);
  // A rank that comes late, after its peers have given up, has no result either. Where they gave up
  // because ranks disagree, it compares all the same: who disagrees with it is to blame.
  const bool gave_up =
      peer(with).standing == Standing::kFailed && !has_finished(peer(with), operation);
  if (gave_up && peer(with).farewell.code != ErrorCode::kCommMismatch) return;
  for (Arrival& arrival : peer(with).arrivals) {
    const Announcement& theirs = arrival.notice.announcement;
    if (!arrival.waiting || theirs.number != operation.number ||
        theirs.channel != partner_channel(operation.channel)) {
      continue;
    }
    arrival.waiting = gave_up;
    agree({.kind = theirs.kind,
           .dtype = theirs.dtype,
           .reduce = theirs.reduce,
           .offered = theirs.offered,
           .expected = theirs.expected});
    if (gave_up) {
      part.matched = false;
      return;
    }
    Lane& first = part.lanes[0];
    if (is_inline(first.in_bytes)) {
      std::copy_n(arrival.notice.payload.begin(), first.in_bytes, first.to);
      first.received = first.in_bytes;
    } else {
      port_->expect_chunks(with, chunks_of(first.in_bytes));
    }
    if (is_inline(first.out_bytes)) first.sent = first.out_bytes;
    port_->expect_chunks(with, chunks_of(part.lanes[1].in_bytes));
    return;
  }
}

void MessageCommunicator::send_lanes(MessageOperation& operation, int32_t to) {
  auto& lanes = operation.parts[static_cast<size_t>(to)].lanes;
  for (size_t round = 0; round < kRounds; ++round) {
    if (round > 0 && !operation.reduced) return;
    Lane& lane = lanes[round];
    while (lane.sent < lane.out_bytes) {
      const ChunkHeader header{.number = operation.number,
                               .offset = lane.sent,
                               .bytes = std::min(kChunkBytes, lane.out_bytes - lane.sent),
                               .channel = partner_channel(operation.channel),
                               .round = static_cast<uint8_t>(round)};
      if (!port_->send_chunk(to, header, lane.from + lane.sent)) return;
      lane.sent += header.bytes;
    }
  }
}

bool MessageCommunicator::is_over(const MessageOperation& operation) const {
  if (!is_complete(operation)) return false;
  for (int32_t to = 0; to < size(); ++to) {
    if (part_of(operation, to).involved && !port_->has_handed_over(to)) return false;
  }
  return true;
}

void MessageCommunicator::check_peers(const MessageOperation& mine, std::string_view phase) {
  if (aborted_by_ >= 0) {
    fail(ErrorCode::kCommAborted, aborted_by_, phase, abort_reason_.data());
  }
  for (int32_t number = 0; number < size(); ++number) {
    const Peer& other = peer(number);
    if (part_of(mine, number).complete()) continue;
    if (other.standing == Standing::kActive) {
      if (!port_->is_cut_off(number)) continue;
      fail(ErrorCode::kCommPeerLost, number, phase,
           fmt::format("the connection to rank {} ended during {}", number, to_string(mine.kind)));
    }
    const Farewell& farewell = other.farewell;
    // Messages that it sent before it left may still be on the way.
    const bool sends_more = port_->chunks_taken(number) < farewell.chunks;
    if (other.standing == Standing::kFailed) {
      if (has_finished(other, mine) && sends_more && !port_->is_cut_off(number)) continue;
      // Every survivor names the rank that caused the first failure, not the one that passed it on.
      const int32_t culprit =
          farewell.culprit == rank() || farewell.culprit < 0 ? number : farewell.culprit;
      fail(farewell.code, culprit, phase,
           fmt::format("rank {} gave up: {}", number, farewell.reason.data()));
    }
    if (sends_more) continue;
    fail(ErrorCode::kCommPeerLost, number, phase,
         fmt::format("rank {} was destroyed during {}", number, to_string(mine.kind)));
  }
}

void MessageCommunicator::end_operations() {
  finished_ = collectives_;
  for (MessageOperation& operation : operations_) {
    if (operation.in_use() && is_collective(operation.kind) && !is_complete(operation)) {
      finished_ = std::min(finished_, operation.number);
    }
    operation.sequence = 0;
  }
}

// A collective that a peer had finished before it gave up has its result here as well.
bool MessageCommunicator::has_finished(const Peer& other, const MessageOperation& mine) const {
  return is_collective(mine.kind) && mine.number < other.farewell.collectives;
}

void MessageCommunicator::watch_processes(const MessageOperation& mine, std::string_view phase) {
  const Clock::time_point now = Clock::now();
  if (now - last_look_ < kBetweenLooks) return;
  last_look_ = now;
  if (verdict_) verdict_->read();
  for (int32_t number = 0; number < size(); ++number) {
    Peer& other = peer(number);
    if (part_of(mine, number).complete() || !has_vanished(number)) continue;
    if (other.seen_dead == Clock::time_point{}) other.seen_dead = now;
    if (now - other.seen_dead < kLastBytes) continue;
    fail(ErrorCode::kCommPeerLost, number, phase,
         fmt::format("the process of rank {}, {}, ended during {}", number, other.identity.pid,
                     to_string(mine.kind)));
  }
}

// Its process is gone, or has closed what joins it to this one without a word.
bool MessageCommunicator::has_vanished(int32_t number) {
  const Peer& other = peer(number);
  if (!may_live(other.identity, self_)) return true;
  if (port_->shows_ends() || other.standing != Standing::kActive) return false;
  return verdict_ && verdict_->has_ended(number);
}

void MessageCommunicator::time_out(const MessageOperation& mine, std::chrono::nanoseconds deadline,
                                   std::string_view phase) {
  // A rank that never came is to blame before one that waits for it.
  int32_t late = -1;
  for (int32_t number = 0; number < size(); ++number) {
    const PeerPart& part = part_of(mine, number);
    if (part.complete()) continue;
    if (late < 0) late = number;
    if (part.matched) continue;
    late = number;
    break;
  }
  // Everything has come, and some peer does not take what is for it.
  for (int32_t number = 0; late < 0 && number < size(); ++number) {
    if (part_of(mine, number).involved && !port_->has_handed_over(number)) late = number;
  }
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(deadline);
  fail(ErrorCode::kCommTimeout, late, phase,
       fmt::format("rank {} did not complete {} within {} ms", late, to_string(mine.kind),
                   waited.count()));
}

void MessageCommunicator::fail(ErrorCode code, int32_t culprit, std::string_view phase,
                               std::string what) {
  const bool told_by_the_aborter = aborted_by_ >= 0;
  end_operations();
  standing_ = Standing::kFailed;
  failure_ = code;
  culprit_ = culprit;
  failure_text_ = what;
  if (!told_by_the_aborter) say_farewell(NoticeKind::kFailed, code, culprit, what);
  throw CommError(code, culprit, std::string(phase), std::move(what));
}

void MessageCommunicator::say_farewell(NoticeKind kind, ErrorCode code, int32_t culprit,
                                       std::string_view reason) noexcept {
  outgoing_.kind = kind;
  outgoing_.farewell = Farewell{.collectives = finished_, .culprit = culprit, .code = code};
  copy_reason(reason, outgoing_.farewell.reason);
  for (int32_t to = 0; to < size(); ++to) {
    if (to == rank()) continue;
    outgoing_.farewell.chunks = port_->chunks_sent(to);
    try {
      port_->post(to, outgoing_, sizeof(Farewell));
    } catch (const std::exception&) {
      continue;  // to that rank: the others are still to be told
    }
  }
}

void MessageCommunicator::check_usable(std::string_view phase) {
  if (usable()) return;
  if (aborted_by_ >= 0) {
    if (standing_ == Standing::kActive) {
      fail(ErrorCode::kCommAborted, aborted_by_, phase, abort_reason_.data());
    }
    throw CommError(ErrorCode::kCommAborted, aborted_by_, std::string(phase), abort_reason_.data());
  }
  throw CommError(failure_, culprit_, std::string(phase),
                  std::exchange(is_unreported_, false)
                      ? failure_text_
                      : "this communicator has failed before and is unusable");
}

}  // namespace conclave::inline v0::comm

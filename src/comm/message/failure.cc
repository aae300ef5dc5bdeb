// How a group ends for a rank: an abort, a peer that has failed, gone or fallen silent, and what
// the rank tells the others of it.
#include "comm/message/message_communicator.h"
#include "comm/message/process_watch.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

using std::chrono_literals::operator""ms;
using Clock = std::chrono::steady_clock;

// Between a process's end and the moment at which nothing more of it can be on the way.
constexpr auto kLastBytes = 100ms;

void copy_reason(std::string_view reason, std::array<char, 256>& to) {
  const size_t length = std::min(reason.size(), to.size() - 1);
  std::copy_n(reason.begin(), length, to.begin());
  to[length] = '\0';
}

// Ranks that disagree, or are told to stop, are there; others may never come to their end.
bool means_a_missing_rank(ErrorCode code) {
  return code == ErrorCode::kCommTimeout || code == ErrorCode::kCommPeerLost;
}

}  // namespace

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

void MessageCommunicator::send_pending_abort() noexcept {
  if (!abort_to_send_) return;
  abort_to_send_ = false;
  say_farewell(NoticeKind::kAborted, ErrorCode::kCommAborted, rank(), abort_reason_.data());
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

// The roll call of processes of one host: each says that it is there, and whoever knows of all, or
// has waited long enough, settles in shared memory who goes on.
#include "comm/deadline.h"
#include "comm/message/message_communicator.h"
#include "comm/message/pause.h"
#include "comm/message/process_watch.h"
#include "comm/survivors.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace conclave::inline v0::comm {

void MessageCommunicator::share_file() {
  const bool on_one_host = std::ranges::all_of(peers_, [&](const Peer& other) {
    return self_.place != 0 && other.identity.place == self_.place;
  });
  if (!on_one_host) file_.reset();
  if (on_one_host && rank() != 0) {
    const Identity& first = peer(0).identity;
    file_ = SharedFile::open(first.pid, first.shared_file, size());
  }
  map_verdict();
  self_.shared_file = verdict_ ? file_->descriptor() : -1;
}

void MessageCommunicator::map_verdict() {
  if (!file_ || !port_->supports_survivors()) return;
  verdict_ = SharedVerdict::map(*file_, port_->epoch(), size());
}

// All ranks answer alike: each has heard in the beginning which of them have the file.
Support MessageCommunicator::shrink_support() const {
  if (Support port = port_->supports_survivors(); !port) return port;
  for (int32_t number = 0; number < size(); ++number) {
    if (peers_[static_cast<size_t>(number)].identity.shared_file >= 0) continue;
    return Support::no(fmt::format(
        "ranks of {} agree on who is left over shared memory, and rank {} is on another "
        "host or may not open it",
        name(), number));
  }
  if (verdict_) return Support::yes();
  return Support::no("there is no shared memory for another agreement on who is left");
}

void MessageCommunicator::call_for_survivors() {
  send_pending_abort();
  if (usable()) {
    end_operations();
    standing_ = Standing::kFailed;
    failure_ = ErrorCode::kCommAborted;
    culprit_ = rank();
    say_farewell(NoticeKind::kFailed, failure_, culprit_,
                 fmt::format("rank {} calls for the survivors", rank()));
  }
  for (MessageOperation& operation : operations_) operation.sequence = 0;
  outgoing_.kind = NoticeKind::kPresent;
  for (int32_t to = 0; to < size(); ++to) port_->post(to, outgoing_, 0);
}

void MessageCommunicator::look_for_ended_processes() {
  const Clock::time_point now = Clock::now();
  if (now - last_look_ < kBetweenLooks) return;
  last_look_ = now;
  for (Peer& other : peers_) other.ended = other.ended || !may_live(other.identity, self_);
}

RollCall MessageCommunicator::roll_call() const {
  RollCall roll(rank(), size());
  for (int32_t number = 0; number < size(); ++number) {
    const Peer& other = peers_[static_cast<size_t>(number)];
    if (other.present) roll.has_come(number);
    if (other.left || other.ended) roll.has_ended(number);
  }
  return roll;
}

MessageSurvivor MessageCommunicator::survivor_of(const std::vector<int32_t>& ranks) {
  MessageSurvivor survivor{.port = port_->survivors(ranks), .file = file_};
  for (const int32_t old : ranks) survivor.identities.push_back(peer(old).identity);
  return survivor;
}

Survivors MessageCommunicator::shrink(std::chrono::nanoseconds deadline, std::string_view phase) {
  port_->check_caller();
  const Clock::time_point until = time_after(deadline);
  MessageLock lock(port_->mutex());
  if (const Support support = shrink_support(); !support) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "this communicator has no shrink", .found = support.reason()});
  }
  if (has_gone_on_) refuse_second_roll_call();
  std::optional<Present> settled = verdict_->read();
  try {
    if (!settled) call_for_survivors();
    last_look_ = Clock::now() - kBetweenLooks;
    Pause pause(*port_);
    while (!settled) {
      const bool expired = Clock::now() >= until;
      read_notices();
      look_for_ended_processes();
      const RollCall roll = roll_call();
      if (expired || roll.is_over()) {
        settled = verdict_->settle(rank(), roll.proposal());
        break;
      }
      pause.without(lock);
      settled = verdict_->read();
    }
  } catch (const PortFailure& failure) {
    throw CommError(ErrorCode::kCommPeerLost, failure.peer(), std::string(phase), failure.what());
  }
  std::vector<int32_t> ranks = ranks_of(*settled);
  some_are_missing_ = ranks.size() < peers_.size();
  rank_among(ranks, rank(), phase);
  has_gone_on_ = true;
  return {.communicator = std::make_unique<MessageCommunicator>(survivor_of(ranks), timeout_),
          .old_ranks = std::move(ranks)};
}

}  // namespace conclave::inline v0::comm

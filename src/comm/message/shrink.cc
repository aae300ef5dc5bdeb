// The roll call of ranks that send messages: each says that it is there, and whoever knows of all,
// or has waited long enough, settles who goes on.
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
namespace {

// After the deadline: for ranks that settle the answer at the same time. No process need answer
// for it, only their hosts.
constexpr auto kSettleTime = std::chrono::seconds(2);

}  // namespace

void MessageCommunicator::share_file(std::shared_ptr<SharedFile> file) {
  const bool on_one_host = std::ranges::all_of(peers_, [&](const Peer& other) {
    return self_.place != 0 && other.identity.place == self_.place;
  });
  if (on_one_host && rank() != 0) {
    const Identity& first = peer(0).identity;
    file = SharedFile::open(first.pid, first.shared_file, size());
  }
  if (on_one_host) place_ = file;
  prepare_verdict();
  self_.shared_file = verdict_ ? file->descriptor() : -1;
}

void MessageCommunicator::prepare_verdict() {
  if (!place_ || !port_->supports_survivors()) return;
  verdict_ = place_->verdict(port_->epoch(), members_, rank());
}

void MessageCommunicator::settle_at(std::shared_ptr<VerdictPlace> place, std::string reason) {
  const MessageLock lock(port_->mutex());
  verdict_.reset();
  place_ = std::move(place);
  no_verdict_ = std::move(reason);
  prepare_verdict();
}

// Each rank has heard which of them have the file, so that all have one or none.
void MessageCommunicator::check_file_is_shared() {
  const auto lacking = std::ranges::find_if(
      peers_, [](const Peer& other) { return other.identity.shared_file < 0; });
  if (lacking == peers_.end()) return;
  no_verdict_ = fmt::format(
      "ranks of {} agree on who is left over shared memory, and rank {} is on another host or may "
      "not open it",
      name(), lacking - peers_.begin());
  verdict_.reset();
  place_.reset();
}

Support MessageCommunicator::shrink_support() const {
  if (Support port = port_->supports_survivors(); !port) return port;
  if (verdict_) return Support::yes();
  if (!no_verdict_.empty()) return Support::no(no_verdict_);
  return Support::no("there is no memory for another agreement on who is left");
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
  port_->give_chunks_up();
  outgoing_.kind = NoticeKind::kPresent;
  for (int32_t to = 0; to < size(); ++to) port_->post(to, outgoing_, 0);
  verdict_->come();
}

void MessageCommunicator::look_for_ended_processes() {
  const Clock::time_point now = Clock::now();
  if (now - last_look_ < kBetweenLooks) return;
  last_look_ = now;
  for (Peer& other : peers_) other.ended = other.ended || !may_live(other.identity, self_);
}

RollCall MessageCommunicator::roll_call() {
  RollCall roll(rank(), size());
  for (int32_t number = 0; number < size(); ++number) {
    const Peer& other = peers_[static_cast<size_t>(number)];
    if (other.present) roll.has_come(number);
    if (other.left || other.ended) roll.has_ended(number);
  }
  verdict_->look(roll);
  return roll;
}

// Until the roll call is over, others may settle it; from then on this rank does.
Present MessageCommunicator::settle(MessageLock& lock, Clock::time_point until,
                                    std::string_view phase) {
  last_look_ = Clock::now() - kBetweenLooks;
  Pause pause(*port_);
  while (true) {
    const bool expired = Clock::now() >= until;
    read_notices();
    look_for_ended_processes();
    const std::optional<Present> known = verdict_->read();
    if (known) return *known;
    const RollCall roll = roll_call();
    if (expired || roll.is_over()) {
      if (const auto settled = verdict_->settle(roll.proposal())) return *settled;
    }
    if (expired && Clock::now() - until >= kSettleTime) {
      const int32_t awaited = verdict_->awaited();
      throw CommError(ErrorCode::kCommTimeout, awaited, std::string(phase),
                      awaited < 0
                          ? "ranks have not settled in time who goes on"
                          : fmt::format("the host of rank {} does not answer: nobody can know "
                                        "whether that rank has gone on",
                                        awaited));
    }
    pause.without(lock);
  }
}

MessageSurvivor MessageCommunicator::survivor_of(const std::vector<int32_t>& ranks) {
  MessageSurvivor survivor{.port = port_->survivors(ranks), .place = place_};
  for (const int32_t old : ranks) {
    survivor.identities.push_back(peer(old).identity);
    survivor.members.push_back(members_[static_cast<size_t>(old)]);
  }
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
    if (!settled) {
      call_for_survivors();
      settled = settle(lock, until, phase);
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

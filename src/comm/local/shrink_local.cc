// The roll call of threads: one mutex guards it, so that there is one answer.
#include "comm/deadline.h"
#include "comm/local/local_communicator.h"
#include "comm/survivors.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <chrono>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

using Clock = std::chrono::steady_clock;

RollCall roll_call_of(LocalGroup& group, int32_t me) {
  RollCall roll(me, group.size());
  for (int32_t rank = 0; rank < group.size(); ++rank) {
    if (group.rank(rank).in_roll_call) roll.has_come(rank);
    if (group.rank(rank).left) roll.has_ended(rank);
  }
  return roll;
}

// Those who have come go on. Everybody else, now or later, finds itself left out.
void end_roll_call(LocalGroup& group, const RollCall& roll) {
  auto successor = std::make_shared<LocalGroup>();
  std::vector<int32_t> survivors = ranks_of(roll.proposal());
  successor->ranks.resize(survivors.size());
  group.survivors = std::move(survivors);
  group.successor = std::move(successor);
  group.changed.notify_all();
}

}  // namespace

Survivors LocalCommunicator::shrink(std::chrono::nanoseconds deadline, std::string_view phase) {
  const Clock::time_point until = time_after(deadline);
  GroupLock lock(group_->mutex);
  if (self().in_roll_call) refuse_second_roll_call();
  if (self().standing == Standing::kActive) {
    self().standing = Standing::kFailed;
    self().failure = ErrorCode::kCommAborted;
    self().culprit = rank_;
    self().reason = fmt::format("rank {} calls for the survivors", rank_);
    withdraw(lock);
  }
  // Threads that go on do not return before this: what they see is decided.
  if (!group_->successor) self().in_roll_call = true;
  group_->changed.notify_all();
  while (!group_->successor) {
    const RollCall roll = roll_call_of(*group_, rank_);
    if (roll.is_over() || Clock::now() >= until) {
      end_roll_call(*group_, roll);
    } else {
      group_->changed.wait_until(lock, until);
    }
  }
  const int32_t mine = rank_among(group_->survivors, rank_, phase);
  return {.communicator = std::make_unique<LocalCommunicator>(group_->successor, mine, timeout_),
          .old_ranks = group_->survivors};
}

}  // namespace conclave::inline v0::comm

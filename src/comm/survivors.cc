#include "comm/survivors.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace conclave::inline v0::comm {

RollCall::RollCall(int32_t me, int32_t ranks)
    : me_(me), came_(static_cast<size_t>(ranks), 0), ended_(static_cast<size_t>(ranks), 0) {
  has_come(me);
}

bool RollCall::is_over() const {
  for (size_t rank = 0; rank < came_.size(); ++rank) {
    if (came_[rank] == 0 && ended_[rank] == 0) return false;
  }
  return true;
}

Present RollCall::proposal() const {
  Present present = came_;
  for (size_t rank = 0; rank < present.size(); ++rank) {
    if (ended_[rank] != 0) present[rank] = 0;
  }
  present[static_cast<size_t>(me_)] = 1;
  return present;
}

std::vector<int32_t> ranks_of(std::span<const uint8_t> present) {
  std::vector<int32_t> ranks;
  for (size_t rank = 0; rank < present.size(); ++rank) {
    if (present[rank] != 0) ranks.push_back(static_cast<int32_t>(rank));
  }
  return ranks;
}

int32_t rank_among(std::span<const int32_t> survivors, int32_t rank, std::string_view phase) {
  const auto place = std::ranges::find(survivors, rank);
  if (place != survivors.end()) return static_cast<int32_t>(place - survivors.begin());
  throw CommError(ErrorCode::kCommExcluded, rank, std::string(phase),
                  fmt::format("rank {} came too late: ranks {} have gone on without it", rank,
                              fmt::join(survivors, ", ")));
}

void refuse_second_roll_call() {
  throw Error(ErrorCode::kState, {.what = "this rank has gone on from this communicator before",
                                  .hint = "ask the communicator that it returned for survivors"});
}

CommError known_as(std::span<const int32_t> old_ranks, const CommError& error) {
  const int32_t peer = error.peer() < 0 ? -1 : old_ranks[static_cast<size_t>(error.peer())];
  // The text begins with the rank and the phase, which an error puts there by itself.
  const std::string& text = error.detail().what;
  const std::string phase = error.phase() + ": ";
  const size_t at = text.find(phase);
  return {error.code(), peer, error.phase(),
          at == std::string::npos ? text : text.substr(at + phase.size())};
}

Survivors call_again(const Survivors& left, std::chrono::nanoseconds deadline,
                     std::string_view phase) {
  try {
    Survivors fewer = left.communicator->shrink(deadline, phase);
    for (int32_t& rank : fewer.old_ranks) rank = left.old_ranks[static_cast<size_t>(rank)];
    return fewer;
  } catch (const CommError& error) {
    throw known_as(left.old_ranks, error);
  }
}

}  // namespace conclave::inline v0::comm

namespace conclave::inline v0 {
namespace {

constexpr std::string_view kPhase = "survivors";

}  // namespace

Survivors survivors(Communicator& failed, const SurvivorOptions& options) {
  if (options.deadline.count() < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a deadline is a time from now",
                 .tensor = "deadline",
                 .expected = "0 or more",
                 .found = fmt::format("{} ns", options.deadline.count())});
  }
  const auto deadline = options.deadline.count() == 0 ? failed.timeout() : options.deadline;
  Survivors left = failed.shrink(deadline, kPhase);
  // A rank that was lost after its answer in the roll call makes another one necessary.
  for (int32_t lost = 0;; ++lost) {
    try {
      Communicator& communicator = *left.communicator;
      communicator.wait(communicator.begin_barrier(), deadline, kPhase);
      return left;
    } catch (const CommError& error) {
      if (lost == failed.size()) throw comm::known_as(left.old_ranks, error);
    }
    left = comm::call_again(left, deadline, kPhase);
  }
}

}  // namespace conclave::inline v0

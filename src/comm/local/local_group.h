// The state that the ranks of a local group share. One mutex guards all of it; only the bytes of
// messages are read and written without it, see RankState::users.
#pragma once

#include "comm/local/operation.h"

#include "conclave/error.h"

#include <array>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace conclave::inline v0::comm {

inline constexpr size_t kMaxOperations = 64;  // under way per rank

enum class Standing : uint8_t { kActive, kFailed, kGone };

struct RankState {
  Standing standing = Standing::kActive;
  // Reason of the failure, and the rank that this rank blames.
  ErrorCode failure = ErrorCode::kCommAborted;
  int32_t culprit = -1;
  std::string reason;
  bool in_roll_call = false;
  bool left = false;  // its communicator is destroyed
  // Threads that are reading or writing this rank's buffers without the lock. A rank that gives up
  // waits for zero, after which nobody touches its buffers.
  int32_t users = 0;
  std::array<Operation, kMaxOperations> operations;
};

struct LocalGroup {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<RankState> ranks;
  int32_t aborted_by = -1;
  std::array<char, 256> abort_reason{};  // fixed, so that abort cannot fail
  // The group that goes on after a failure, set once: ranks that see it have the same answer.
  std::shared_ptr<LocalGroup> successor;
  std::vector<int32_t> survivors;  // the ranks here of its ranks

  int32_t size() const { return static_cast<int32_t>(ranks.size()); }
  RankState& rank(int32_t number) { return ranks[static_cast<size_t>(number)]; }
};

}  // namespace conclave::inline v0::comm

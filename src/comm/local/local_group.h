// The state that the ranks of a local group share. One mutex guards all of it; only the bytes of
// messages are read without it, see RankState::readers.
#pragma once

#include "comm/local/operation.h"

#include "conclave/error.h"

#include <array>
#include <condition_variable>
#include <cstdint>
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
  // Peers that are copying out of this rank's buffers without the lock. A rank that gives up waits
  // for zero, after which no peer reads its buffers.
  int32_t readers = 0;
  std::array<Operation, kMaxOperations> operations;
};

struct LocalGroup {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<RankState> ranks;
  int32_t aborted_by = -1;
  std::array<char, 256> abort_reason{};  // fixed, so that abort cannot fail
};

}  // namespace conclave::inline v0::comm

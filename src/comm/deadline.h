// Deadlines as points of time.
#pragma once

#include <chrono>

namespace conclave::inline v0::comm {

// The end of time for deadlines that lie beyond it.
inline std::chrono::steady_clock::time_point time_after(std::chrono::nanoseconds deadline) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point now = Clock::now();
  return deadline >= Clock::time_point::max() - now ? Clock::time_point::max() : now + deadline;
}

// The time left. What has come by then is still taken, so that it is never none.
inline std::chrono::nanoseconds time_until(std::chrono::steady_clock::time_point until) {
  const std::chrono::nanoseconds left = until - std::chrono::steady_clock::now();
  constexpr std::chrono::nanoseconds kLeast = std::chrono::milliseconds(1);
  return left < kLeast ? kLeast : left;
}

}  // namespace conclave::inline v0::comm

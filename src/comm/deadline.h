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

}  // namespace conclave::inline v0::comm

// How a rank waits for messages: MPI has no call that waits until a deadline.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

namespace conclave::inline v0::comm {

class Pause {
 public:
  // Gives up the lock for a moment: first for other threads only, later for longer, so that ranks
  // that share a core do not take it from the one they wait for.
  void without(std::unique_lock<std::mutex>& lock) {
    using std::chrono_literals::operator""us;
    constexpr int64_t kYields = 2000;
    constexpr int64_t kShortSleeps = 4000;
    lock.unlock();
    ++rounds_;
    if (rounds_ < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(rounds_ < kShortSleeps ? 20us : 200us);
    }
    lock.lock();
  }

 private:
  int64_t rounds_ = 0;
};

}  // namespace conclave::inline v0::comm

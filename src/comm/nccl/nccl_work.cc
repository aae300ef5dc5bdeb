#include "comm/nccl/nccl_work.h"

#include "comm/deadline.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <unistd.h>
#include <utility>
#include <vector>

namespace conclave::inline v0::comm {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

struct NcclWork::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_over = false;

  void end() {
    const std::lock_guard lock(mutex);
    is_over = true;
    changed.notify_all();
  }
  bool wait_until(Clock::time_point until) {
    std::unique_lock lock(mutex);
    return changed.wait_until(lock, until, [this] { return is_over; });
  }
};

namespace {

// Threads that were left while they worked. They belong to the process, whose end joins them.
class LeftThreads {
 public:
  void add(std::thread thread, std::function<bool(Clock::time_point)> ends_before) {
    const std::lock_guard lock(mutex_);
    // Registered behind NCCL and CUDA, which such a thread has loaded, it runs before their ends.
    if (!std::exchange(is_registered_, true)) std::atexit([] { all().await(); });
    threads_.push_back({std::move(thread), std::move(ends_before)});
  }

  bool is_given_up() const { return is_given_up_.load(std::memory_order_acquire); }

  static LeftThreads& all() {
    // Never destroyed: threads may outlive everything else.
    static LeftThreads& left = *new LeftThreads();
    return left;
  }

 private:
  struct Left {
    std::thread thread;
    std::function<bool(Clock::time_point)> ends_before;
  };

  // A thread that is still at work then stays as it is.
  void await() {
    // A child of a fork has none of the threads.
    if (::getpid() != process_) return;
    const Clock::time_point until = Clock::now() + NcclWork::kExitTime;
    const std::lock_guard lock(mutex_);
    for (Left& left : threads_) {
      if (left.ends_before(until)) {
        left.thread.join();
      } else {
        is_given_up_.store(true, std::memory_order_release);
      }
    }
  }

  const pid_t process_ = ::getpid();
  std::mutex mutex_;
  std::vector<Left> threads_;
  bool is_registered_ = false;
  std::atomic<bool> is_given_up_{false};
};

}  // namespace

NcclWork::NcclWork(std::function<void()> work) : state_(std::make_shared<State>()) {
  thread_ = std::thread([state = state_, own = std::move(work)] {
    own();
    go_on();
    state->end();
  });
}

NcclWork::~NcclWork() {
  if (wait_for({})) {
    thread_.join();
    return;
  }
  LeftThreads::all().add(std::move(thread_), [state = state_](Clock::time_point until) {
    return state->wait_until(until);
  });
}

bool NcclWork::wait_for(std::chrono::nanoseconds time) {
  return state_->wait_until(time_after(time));
}

void NcclWork::go_on() {
  while (LeftThreads::all().is_given_up()) std::this_thread::sleep_for(std::chrono::hours(1));
}

}  // namespace conclave::inline v0::comm

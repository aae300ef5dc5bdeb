#include "layer/migration/pace.h"

#include <algorithm>
#include <chrono>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <thread>
#include <time.h>
#include <unistd.h>

namespace conclave::inline v0 {
namespace {

// A sleep is at most this long, so that whoever ends the copy does not wait for it.
constexpr std::chrono::milliseconds kLongestRest{100};
// Shorter ones cost more than they give.
constexpr std::chrono::microseconds kShortestRest{50};
// A third of the weight of a thread like the one that made it: it yields, and is not starved.
constexpr int kNicer = 5;

int64_t thread_time_ns() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

Pace::Pace(double share) : share_(share), used_ns_(thread_time_ns()) {}

void Pace::rest() {
  if (share_ >= 1) return;
  const int64_t used = thread_time_ns();
  const double owed = static_cast<double>(used - used_ns_) * (1 / share_ - 1);
  const std::chrono::nanoseconds pause(static_cast<int64_t>(std::min(owed, 1e12)));
  if (pause < kShortestRest) return;
  used_ns_ = used;
  std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, kLongestRest));
}

void yield_to_others() noexcept {
  // On Linux this concerns the thread alone; where it is refused, the pace has to do.
  const auto thread = static_cast<id_t>(syscall(SYS_gettid));
  const int own = getpriority(PRIO_PROCESS, thread);
  static_cast<void>(setpriority(PRIO_PROCESS, thread, own + kNicer));
}

}  // namespace conclave::inline v0

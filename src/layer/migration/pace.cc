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

int64_t now_ns(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

Pace::Pace(double share)
    : share_(share),
      used_ns_(now_ns(CLOCK_THREAD_CPUTIME_ID)),
      passed_ns_(now_ns(CLOCK_MONOTONIC)) {}

// A piece that had to wait for a peer has rested meanwhile. Were it to rest again, both ends would
// take turns waiting for each other's rests.
void Pace::rest() {
  if (!rests()) return;
  const int64_t used = now_ns(CLOCK_THREAD_CPUTIME_ID);
  const int64_t passed = now_ns(CLOCK_MONOTONIC);
  const double owed =
      static_cast<double>(used - used_ns_) / share_ - static_cast<double>(passed - passed_ns_);
  const std::chrono::nanoseconds pause(static_cast<int64_t>(std::clamp(owed, 0.0, 1e12)));
  // Debts add up until they are worth a rest; a rest that was too long is not made up for.
  if (owed > 0 && pause < kShortestRest) return;
  const auto rest = std::min<std::chrono::nanoseconds>(pause, kLongestRest);
  used_ns_ = used;
  passed_ns_ = passed + rest.count();
  if (rest.count() > 0) std::this_thread::sleep_for(rest);
}

void yield_to_others() noexcept {
  // On Linux this concerns the thread alone; where it is refused, the pace has to do.
  const auto thread = static_cast<id_t>(syscall(SYS_gettid));
  const int own = getpriority(PRIO_PROCESS, thread);
  static_cast<void>(setpriority(PRIO_PROCESS, thread, own + kNicer));
}

}  // namespace conclave::inline v0

// How a thread that copies in the background rests: by its processor time, and not for waits.
#include "layer/migration/pace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <time.h>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using Clock = std::chrono::steady_clock;
constexpr double kShare = 0.05;

// Uses so much of a core, however long the machine takes to give it.
void work(std::chrono::nanoseconds time) {
  const auto used = [] {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
  };
  const auto until = used() + time;
  while (used() < until) continue;
}

Clock::duration time_of_rest(Pace& pace) {
  const auto begin = Clock::now();
  pace.rest();
  return Clock::now() - begin;
}

TEST(Pace, AfterWork_RestsUntilItWasThatPartOfTheTime) {
  Pace pace(kShare);
  const auto begin = Clock::now();
  work(3ms);
  pace.rest();
  EXPECT_GE(Clock::now() - begin, 59ms);
}

TEST(Pace, OfAWholeCore_NeverRests) {
  Pace pace(1);
  EXPECT_FALSE(pace.rests());
  const auto begin = Clock::now();
  work(3ms);
  const auto worked = Clock::now() - begin;
  pace.rest();
  EXPECT_LT(Clock::now() - begin - worked, 50ms);
}

// Ends of a message would otherwise take turns: the rest of one is a wait of the other, which rests
// longer for it.
TEST(Pace, AfterAWaitThatWasLongEnough_RestsNoMore) {
  Clock::duration least = Clock::duration::max();
  for (int attempt = 0; attempt < 3; ++attempt) {
    Pace pace(kShare);
    work(4ms);
    std::this_thread::sleep_for(100ms);
    least = std::min(least, time_of_rest(pace));
  }
  EXPECT_LT(least, 20ms) << "76 ms are what its work owes";
}

TEST(Pace, AWaitBefore_IsNotSavedUp) {
  Pace pace(kShare);
  std::this_thread::sleep_for(200ms);
  pace.rest();
  const auto begin = Clock::now();
  work(3ms);
  pace.rest();
  EXPECT_GE(Clock::now() - begin, 59ms);
}

}  // namespace
}  // namespace conclave

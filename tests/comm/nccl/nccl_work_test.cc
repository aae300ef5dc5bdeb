// Threads that NCCL holds up: joined where their work is over, else by the end of the process, in
// bounded time. Needs neither a GPU nor NCCL.
#include "comm/nccl/nccl_work.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace conclave {
namespace {

using comm::NcclWork;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using Clock = std::chrono::steady_clock;

// CUDA has such for each thread that calls it.
struct OwnOfThread {
  explicit OwnOfThread(std::atomic<bool>& gone) : gone_(gone) {}
  OwnOfThread(const OwnOfThread&) = delete;
  OwnOfThread& operator=(const OwnOfThread&) = delete;
  ~OwnOfThread() {
    std::this_thread::sleep_for(100ms);
    gone_ = true;
  }

 private:
  std::atomic<bool>& gone_;
};

TEST(NcclWork, WhatIsOver_LeavesNoThread) {
  std::atomic<bool> gone = false;
  {
    NcclWork work([&] { thread_local const OwnOfThread own(gone); });
    EXPECT_TRUE(work.wait_for(20s));
    EXPECT_TRUE(work.wait_for(0s));
  }
  EXPECT_TRUE(gone) << "the thread still has what it had of its own";
}

TEST(NcclWork, WhatIsNotOverInTime_IsSaidToBeSo) {
  std::atomic<bool> ends = false;
  std::atomic<bool> has_ended = false;
  {
    NcclWork work([&] {
      while (!ends) std::this_thread::sleep_for(1ms);
      has_ended = true;
    });
    EXPECT_FALSE(work.wait_for(5ms));
  }
  EXPECT_FALSE(has_ended) << "the end of the object waited";
  ends = true;
  while (!has_ended) std::this_thread::sleep_for(1ms);
}

// The process takes nothing apart before.
[[noreturn]] void leave_one_and_exit(std::chrono::milliseconds time) {
  std::atexit([] {
    std::this_thread::sleep_for(600ms);
    std::fputs("taken apart. ", stderr);
  });
  {
    NcclWork work([time] {
      std::this_thread::sleep_for(time);
      NcclWork::go_on();
      std::fputs("work is over. ", stderr);
    });
    work.wait_for(1ms);
  }
  std::exit(7);
}

TEST(NcclWork, TheEndOfTheProcess_WaitsForWhatWasLeft) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(leave_one_and_exit(300ms), ::testing::ExitedWithCode(7),
              "work is over. taken apart. ");
}

TEST(NcclWork, TheEndOfTheProcess_WaitsInBounds_AndWhatComesBackLaterCallsNothing) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Clock::time_point begin = Clock::now();
  EXPECT_EXIT(leave_one_and_exit(60s), ::testing::ExitedWithCode(7), "^taken apart. $");
  // This one comes back while the process takes things apart.
  EXPECT_EXIT(leave_one_and_exit(2300ms), ::testing::ExitedWithCode(7), "^taken apart. $");
  EXPECT_LT(Clock::now() - begin, 20s);
}

}  // namespace
}  // namespace conclave

#include "cpu/thread_pool.h"

#include "cpu/parallel.h"
#include "cpu/topology.h"
#include "cpu/turn.h"
#include "support/sanitizers.h"

#include "conclave/context.h"
#include "conclave/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <memory>
#include <mutex>
#include <sched.h>
#include <stdexcept>
#include <string>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace conclave {
namespace {

std::unique_ptr<Executor> pool_of(int32_t threads) {
  return make_thread_pool({.num_threads = threads});
}

template <class Body>
void run_region(Executor& executor, const Body& body) {
  executor.run(
      {.invoke = [](void* state, int32_t worker) noexcept { (*static_cast<Body*>(state))(worker); },
       .state = const_cast<Body*>(&body)});
}

class PoolOfSize : public testing::TestWithParam<int32_t> {};

TEST_P(PoolOfSize, ManyRegions_RunEachWorkerExactlyOnce) {
  const int32_t threads = GetParam();
  const auto pool = pool_of(threads);
  ASSERT_EQ(pool->concurrency(), threads);
  // These are plain integers: the pool itself must order each region after the one before.
  std::vector<int64_t> calls(static_cast<size_t>(threads) * 16);
  // If other processes hold the CPUs, a region can cost a time slice, so fewer regions must
  // suffice.
  constexpr int64_t kRegions = 100000;
  constexpr int64_t kAtLeast = 2000;
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(3);
  int64_t regions = 0;
  while (regions < kRegions && (regions < kAtLeast || std::chrono::steady_clock::now() < give_up)) {
    run_region(*pool, [&](int32_t worker) { ++calls[static_cast<size_t>(worker) * 16]; });
    ++regions;
  }
  for (int32_t worker = 0; worker < threads; ++worker) {
    EXPECT_EQ(calls[static_cast<size_t>(worker) * 16], regions) << worker;
  }
}

TEST_P(PoolOfSize, WritesOfARegion_AreSeenByTheNext) {
  const int32_t threads = GetParam();
  const auto pool = pool_of(threads);
  const auto count = static_cast<size_t>(threads);
  std::vector<int64_t> values(count, 0);
  std::vector<int64_t> next(count, 0);
  for (int round = 0; round < 500; ++round) {
    run_region(*pool, [&](int32_t worker) {
      const auto own = static_cast<size_t>(worker);
      next[own] = values[(own + 1) % count] + 1;
    });
    std::swap(values, next);
  }
  for (const int64_t value : values) EXPECT_EQ(value, 500);
}

TEST_P(PoolOfSize, PauseBetweenRegions_WakesSleepingThreads) {
  const auto pool = pool_of(GetParam());
  std::atomic<int32_t> calls{0};
  for (int region = 0; region < 20; ++region) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    run_region(*pool, [&](int32_t) { calls.fetch_add(1); });
  }
  EXPECT_EQ(calls.load(), 20 * GetParam());
}

TEST_P(PoolOfSize, ParallelFor_CoversEachIndexOnce) {
  const auto pool = pool_of(GetParam());
  for (const int64_t count : {0, 1, 2, 63, 64, 65, 1000}) {
    for (const int64_t grain : {0, 1, 7, 64, 5000}) {
      std::vector<int32_t> visits(static_cast<size_t>(count), 0);
      cpu::parallel_for(*pool, count, grain, [&](int64_t begin, int64_t end, int32_t worker) {
        EXPECT_LT(begin, end);
        EXPECT_LE(end - begin, std::max<int64_t>(grain, 1));
        EXPECT_GE(worker, 0);
        EXPECT_LT(worker, pool->concurrency());
        for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
      });
      EXPECT_EQ(std::count(visits.begin(), visits.end(), 1), count) << count << " by " << grain;
    }
  }
}

TEST_P(PoolOfSize, ParallelForThrowing_RethrowsOneExceptionAndStaysUsable) {
  const auto pool = pool_of(GetParam());
  for (int round = 0; round < 50; ++round) {
    std::atomic<int64_t> visited{0};
    try {
      cpu::parallel_for_throwing(*pool, 1000, 1, [&](int64_t begin, int64_t, int32_t) {
        visited.fetch_add(1);
        if (begin % 10 == 5) throw std::runtime_error("index " + std::to_string(begin));
      });
      FAIL() << "no error";
    } catch (const std::runtime_error& error) {
      EXPECT_TRUE(std::string(error.what()).ends_with('5')) << error.what();
    }
    EXPECT_LT(visited.load(), 1000) << "the rest was not stopped";
  }
  int64_t sum = 0;
  cpu::parallel_for_throwing(*pool, 10, 100,
                             [&](int64_t begin, int64_t end, int32_t) { sum += end - begin; });
  EXPECT_EQ(sum, 10);
}

TEST_P(PoolOfSize, NestedRun_ExecutesAllWorkersInline) {
  const auto pool = pool_of(GetParam());
  std::atomic<int32_t> inner_calls{0};
  run_region(*pool, [&](int32_t) {
    const auto thread = std::this_thread::get_id();
    run_region(*pool, [&](int32_t) {
      EXPECT_EQ(std::this_thread::get_id(), thread);
      inner_calls.fetch_add(1);
    });
  });
  EXPECT_EQ(inner_calls.load(), GetParam() * GetParam());
}

TEST_P(PoolOfSize, NestedThroughAnotherPool_DoesNotDeadlock) {
  const auto outer = pool_of(GetParam());
  const auto middle = pool_of(2);
  std::atomic<int32_t> calls{0};
  run_region(*outer, [&](int32_t) {
    run_region(*middle, [&](int32_t) { run_region(*outer, [&](int32_t) { calls.fetch_add(1); }); });
  });
  EXPECT_EQ(calls.load(), GetParam() * 2 * GetParam());
}

TEST_P(PoolOfSize, TwoCallers_TakeTurns) {
  const auto pool = pool_of(GetParam());
  std::atomic<int32_t> inside{0};
  std::atomic<int32_t> calls{0};
  std::atomic<bool> overlapped{false};
  const auto caller = [&] {
    for (int region = 0; region < 200; ++region) {
      std::atomic<int32_t> own{0};
      run_region(*pool, [&](int32_t) {
        if (inside.fetch_add(1) >= pool->concurrency()) overlapped.store(true);
        own.fetch_add(1);
        calls.fetch_add(1);
        inside.fetch_sub(1);
      });
      EXPECT_EQ(own.load(), pool->concurrency()) << "returned before its own region was done";
    }
  };
  std::thread other(caller);
  caller();
  other.join();
  EXPECT_EQ(calls.load(), 2 * 200 * GetParam());
  // A pool of one runs on its callers, which need not exclude each other.
  if (GetParam() > 1) {
    EXPECT_FALSE(overlapped.load());
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, PoolOfSize, testing::Range(1, 9));

// Runs body(worker) on every thread of the pool: worker 0 holds the caller until all have begun.
template <class Body>
void run_on_own_threads(Executor& executor, const Body& body) {
  std::atomic<int32_t> begun{1};
  run_region(executor, [&](int32_t worker) {
    if (worker != 0) begun.fetch_add(1);
    while (worker == 0 && begun.load() < executor.concurrency()) std::this_thread::yield();
    body(worker);
  });
}

TEST(ThreadPool, BusyCaller_LeavesEachWorkerToItsThread) {
  const auto pool = pool_of(3);
  const auto thread_ids = [&] {
    std::vector<std::thread::id> ids(3);
    run_on_own_threads(*pool, [&](int32_t worker) {
      ids[static_cast<size_t>(worker)] = std::this_thread::get_id();
    });
    return ids;
  };
  const std::vector<std::thread::id> ids = thread_ids();
  EXPECT_EQ(ids[0], std::this_thread::get_id());
  EXPECT_NE(ids[1], ids[0]);
  EXPECT_NE(ids[1], ids[2]);
  EXPECT_EQ(thread_ids(), ids) << "a thread is always the same worker";
}

TEST(ThreadPool, ThreadsThatDoNotBegin_AreReplacedByTheCaller) {
  // With far more threads than CPUs, sooner or later the caller is done before some thread wakes.
  const auto pool = pool_of(64);
  std::atomic<int32_t> by_caller{0};
  const auto caller = std::this_thread::get_id();
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  for (int region = 0; region < 100 || by_caller.load() == 0; ++region) {
    std::vector<int32_t> calls(64, 0);
    run_region(*pool, [&](int32_t worker) {
      ++calls[static_cast<size_t>(worker)];
      if (worker != 0 && std::this_thread::get_id() == caller) by_caller.fetch_add(1);
    });
    ASSERT_EQ(std::count(calls.begin(), calls.end(), 1), 64) << region;
    ASSERT_LT(std::chrono::steady_clock::now(), give_up) << "the caller never took over";
  }
}

TEST(ThreadPool, CreatedAndDestroyedUnused_Ends) {
  for (int i = 0; i < 200; ++i) EXPECT_EQ(pool_of(4)->concurrency(), 4);
}

TEST(ThreadPool, DefaultSize_IsTheUsableCpus) {
  EXPECT_EQ(make_thread_pool()->concurrency(), cpu::usable_cpu_count());
}

TEST(ThreadPool, CountOutOfRange_IsATypedError) {
  for (const int32_t count : {-1, 1 << 20}) {
    try {
      static_cast<void>(pool_of(count));
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(error.detail().found, std::to_string(count));
    }
  }
}

TEST(ThreadPool, Pinned_KeepsItsThreadsOnOneCpuEach) {
  const auto pool = make_thread_pool({.num_threads = 3, .pin_threads = true});
  const std::vector<int32_t> cpus = cpu::affinity_cpus();
  std::vector<std::vector<int32_t>> masks(3);
  run_on_own_threads(
      *pool, [&](int32_t worker) { masks[static_cast<size_t>(worker)] = cpu::affinity_cpus(); });
  EXPECT_EQ(masks[0], cpus) << "the application's thread is left alone";
  for (size_t worker = 1; worker < 3; ++worker) {
    EXPECT_EQ(masks[worker], std::vector<int32_t>{cpus[worker % cpus.size()]});
  }
}

#if CONCLAVE_TEST_TSAN
constexpr bool kThreadSanitizer = true;
constexpr bool kAddressSanitizer = false;
#elif CONCLAVE_TEST_ASAN
constexpr bool kThreadSanitizer = false;
constexpr bool kAddressSanitizer = true;
#elif defined(__has_feature)
constexpr bool kThreadSanitizer = __has_feature(thread_sanitizer);
constexpr bool kAddressSanitizer = __has_feature(address_sanitizer);
#else
constexpr bool kThreadSanitizer = false;
constexpr bool kAddressSanitizer = false;
#endif

template <class Child>
int exit_status_of(const Child& child) {
  const pid_t pid = fork();
  if (pid == 0) _exit(child());
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(ThreadPool, UsedInAForkedChild_IsATypedError) {
  if (kThreadSanitizer || kAddressSanitizer) {
    GTEST_SKIP() << "sanitizers do not follow a fork with threads";
  }
  const auto pool = pool_of(2);
  run_region(*pool, [](int32_t) {});
  const int status = exit_status_of([&] {
    try {
      run_region(*pool, [](int32_t) {});
    } catch (const Error& error) {
      return error.code() == ErrorCode::kForked ? 0 : 2;
    }
    return 1;
  });
  EXPECT_EQ(status, 0);
  int32_t calls = 0;
  run_region(*pool, [&](int32_t worker) { calls += worker == 0 ? 1 : 0; });
  EXPECT_EQ(calls, 1) << "the parent's pool works on";
}

TEST(Turn, ThreadThatForkLeavesBehind_HoldsItNoMore) {
  if (kThreadSanitizer || kAddressSanitizer) {
    GTEST_SKIP() << "sanitizers do not follow a fork with threads";
  }
  cpu::Turn turn;
  std::atomic<bool> is_held{false};
  std::atomic<bool> may_end{false};
  std::thread holder([&] {
    const std::lock_guard lock(turn);
    is_held = true;
    while (!may_end) std::this_thread::yield();
  });
  while (!is_held) std::this_thread::yield();
  const int status = exit_status_of([&] {
    ::alarm(10);
    for (int i = 0; i < 2; ++i) {
      turn.lock();
      turn.unlock();
    }
    return 0;
  });
  may_end = true;
  holder.join();
  EXPECT_EQ(status, 0);
  const std::lock_guard lock(turn);
}

TEST(ThreadPool, ForkedChild_DestroysTheParentsPoolAndMakesItsOwn) {
  // AddressSanitizer's own locks, held by a thread that fork leaves behind, stop a new one.
  if (kThreadSanitizer || kAddressSanitizer) {
    GTEST_SKIP() << "sanitizers do not follow a fork with threads that starts more";
  }
  auto pool = pool_of(4);
  const int status = exit_status_of([&] {
    pool.reset();
    const auto own = pool_of(4);
    std::atomic<int32_t> calls{0};
    run_region(*own, [&](int32_t) { calls.fetch_add(1); });
    return calls.load() == 4 ? 0 : 1;
  });
  EXPECT_EQ(status, 0);
}

TEST(ThreadPool, ThreadsThatCannotStart_AreATypedError) {
  if (kThreadSanitizer || kAddressSanitizer) GTEST_SKIP() << "sanitizers need address space";
  const int status = exit_status_of([] {
    // This leaves room for the stacks of a few threads, not of 256.
    std::ifstream pages_of("/proc/self/statm");
    rlim_t pages = 0;
    pages_of >> pages;
    const rlim_t bytes = pages * 4096 + (rlim_t{64} << 20);
    const rlimit limit{.rlim_cur = bytes, .rlim_max = bytes};
    if (setrlimit(RLIMIT_AS, &limit) != 0) return 3;
    try {
      static_cast<void>(pool_of(256));
    } catch (const Error& error) {
      const bool named = error.detail().what.find("of 256") != std::string::npos;
      return error.code() == ErrorCode::kOutOfMemory && named ? 0 : 2;
    }
    return 1;
  });
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace conclave

// executor_tbb [PAIRS [THREADS]] compares the library's thread pool with oneTBB behind the same
// interface. Prints the medians of alternating measurements and the heap allocations per region.
// docs/adr/0007-own-thread-pool.md quotes the output.
#include "conclave/context.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>
#include <string>
#include <string_view>
#include <sys/mman.h>
#include <thread>
#include <vector>

namespace {

std::atomic<int64_t> heap_calls{0};

}  // namespace

// Counts allocations of every library in the process from the C heap, through glibc's own entry
// points. oneTBB's allocator maps memory itself and does not show here; a sanitizer has its own
// heap.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kCountsHeap = false;
#else
constexpr bool kCountsHeap = true;
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

void* malloc(size_t bytes) {
  heap_calls.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  heap_calls.fetch_add(1, std::memory_order_relaxed);
  return __libc_calloc(count, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  heap_calls.fetch_add(1, std::memory_order_relaxed);
  return __libc_memalign(alignment, bytes);
}
}
#endif

namespace {

using conclave::Executor;
using conclave::ParallelTask;
using Clock = std::chrono::steady_clock;

// Every index of a static partition is one worker, which runs exactly once, as the interface
// requires.
class TbbExecutor final : public Executor {
 public:
  explicit TbbExecutor(int32_t threads)
      : limit_(tbb::global_control::max_allowed_parallelism, static_cast<size_t>(threads)),
        arena_(threads) {}
  int32_t concurrency() const noexcept override { return arena_.max_concurrency(); }
  void run(ParallelTask task) override {
    arena_.execute([&] {
      tbb::parallel_for(
          0, concurrency(), [&](int32_t worker) { task.invoke(task.state, worker); },
          tbb::static_partitioner());
    });
  }

 private:
  tbb::global_control limit_;
  tbb::task_arena arena_;
};

// Reads [begin, begin + bytes) of a shared block in chunks that the workers take in turn.
struct ReadRegion {
  const uint64_t* words;
  int64_t count;
  int64_t grain;
  std::atomic<int64_t> next{0};
  std::atomic<uint64_t> sink{0};

  static void invoke(void* state, int32_t /*worker*/) noexcept {
    auto& region = *static_cast<ReadRegion*>(state);
    uint64_t sum = 0;
    while (true) {
      const int64_t begin = region.next.fetch_add(region.grain, std::memory_order_relaxed);
      if (begin >= region.count) break;
      const int64_t end = std::min(begin + region.grain, region.count);
      for (int64_t i = begin; i < end; ++i) sum += region.words[i];
    }
    region.sink.fetch_add(sum, std::memory_order_relaxed);
  }
};

// Walks through a block much larger than the caches, on huge pages like packed weights, so that
// each forward reads new memory.
class Weights {
 public:
  explicit Weights(int64_t bytes) : count_(bytes / int64_t{sizeof(uint64_t)}) {
    constexpr size_t kHugePage = size_t{2} << 20;
    void* data = std::aligned_alloc(kHugePage, static_cast<size_t>(bytes));
    if (data == nullptr) throw std::bad_alloc();
    madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);
    std::memset(data, 1, static_cast<size_t>(bytes));
    words_.reset(static_cast<uint64_t*>(data));
  }
  const uint64_t* next(int64_t count) {
    if (position_ + count > count_) position_ = 0;
    const uint64_t* words = words_.get() + position_;
    position_ += count;
    return words;
  }

 private:
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  std::unique_ptr<uint64_t[], Free> words_;
  int64_t count_;
  int64_t position_ = 0;
};

void read(Executor& executor, Weights& weights, int64_t bytes, int64_t grain_bytes) {
  const int64_t count = bytes / int64_t{sizeof(uint64_t)};
  ReadRegion region{.words = weights.next(count),
                    .count = count,
                    .grain = grain_bytes / int64_t{sizeof(uint64_t)}};
  executor.run({.invoke = ReadRegion::invoke, .state = &region});
}

// Stands for what one thread does between two regions: routing, permutation, the weighted sum.
void serial_work(std::chrono::microseconds time) {
  const auto end = Clock::now() + time;
  while (Clock::now() < end) {
  }
}

struct Load {
  std::string_view name;
  int repetitions;  // calls of `forward` per measurement
  std::function<void(Executor&)> forward;
};

double microseconds_per_forward(Executor& executor, const Load& load) {
  // The pause lets the other executor's threads fall asleep.
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  load.forward(executor);
  const auto start = Clock::now();
  for (int i = 0; i < load.repetitions; ++i) load.forward(executor);
  const std::chrono::duration<double, std::micro> elapsed = Clock::now() - start;
  return elapsed.count() / load.repetitions;
}

double quantile(std::vector<double> values, double fraction) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(fraction * static_cast<double>(values.size() - 1))];
}

std::string heap_calls_per_forward(Executor& executor, const Load& load) {
  if (!kCountsHeap) return "-";
  const int64_t before = heap_calls.load();
  for (int i = 0; i < load.repetitions; ++i) load.forward(executor);
  const auto calls = static_cast<double>(heap_calls.load() - before);
  return fmt::format("{:.2f}", calls / load.repetitions);
}

void compare(Executor& own, Executor& other, const Load& load, int pairs) {
  std::vector<double> own_times;
  std::vector<double> other_times;
  std::vector<double> ratios;
  for (int pair = 0; pair < pairs; ++pair) {
    const bool own_first = pair % 2 == 0;
    double first = microseconds_per_forward(own_first ? own : other, load);
    double second = microseconds_per_forward(own_first ? other : own, load);
    if (!own_first) std::swap(first, second);
    own_times.push_back(first);
    other_times.push_back(second);
    ratios.push_back(second / first);
  }
  fmt::print("{:<28} {:>10.2f} {:>10.2f} {:>8.3f} {:>8.3f} {:>8.3f} {:>8} {:>8}\n", load.name,
             quantile(own_times, 0.5), quantile(other_times, 0.5), quantile(ratios, 0.25),
             quantile(ratios, 0.5), quantile(ratios, 0.75), heap_calls_per_forward(own, load),
             heap_calls_per_forward(other, load));
}

}  // namespace

int main(int argc, char** argv) {
  const int pairs = argc > 1 ? std::atoi(argv[1]) : 101;
  const int threads = argc > 2 ? std::atoi(argv[2]) : 2;
  constexpr int64_t kMegabyte = 1'000'000;
  const auto own = conclave::make_thread_pool({.num_threads = threads});
  TbbExecutor tbb(threads);
  Weights weights(int64_t{1} << 30);

  const std::vector<Load> loads = {
      {"empty region", 2000,
       [](Executor& executor) {
         executor.run({.invoke = [](void*, int32_t) noexcept {}, .state = nullptr});
       }},
      {"empty, 20 us apart", 500,
       [](Executor& executor) {
         serial_work(std::chrono::microseconds(20));
         executor.run({.invoke = [](void*, int32_t) noexcept {}, .state = nullptr});
       }},
      {"small layer, 10 MB and 5 MB", 100,
       [&](Executor& executor) {
         serial_work(std::chrono::microseconds(10));
         read(executor, weights, 10 * kMegabyte, 256 * 1024);
         read(executor, weights, 5 * kMegabyte, 256 * 1024);
       }},
      {"decode, 75 MB and 37 MB", 8,
       [&](Executor& executor) {
         serial_work(std::chrono::microseconds(20));
         read(executor, weights, 75 * kMegabyte, 512 * 1024);
         read(executor, weights, 37 * kMegabyte, 512 * 1024);
       }},
  };
  fmt::print("{} threads, medians of {} alternating pairs; ratio = TBB / own\n", threads, pairs);
  fmt::print("{:<28} {:>10} {:>10} {:>8} {:>8} {:>8} {:>8} {:>8}\n", "load", "own us", "TBB us",
             "ratio25", "ratio50", "ratio75", "own heap", "TBB heap");
  for (const Load& load : loads) compare(*own, tbb, load, pairs);
  return 0;
}

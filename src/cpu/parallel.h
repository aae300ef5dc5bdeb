// Distributes work over an Executor: one shared counter, tasks taken in ascending order.
#pragma once

#include "conclave/context.h"

#include <atomic>
#include <cstdint>
#include <exception>
#include <type_traits>

namespace conclave::inline v0::cpu {

// Calls body(begin, end, worker) on disjoint ranges of at most `grain` that cover [0, count). body
// must not throw. Does not allocate. Ranges are handed out dynamically, so no result may depend on
// which worker computed it.
template <class Body>
void parallel_for(Executor& executor, int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  if (grain < 1) grain = 1;
  if (executor.concurrency() == 1 || count <= grain) {
    for (int64_t begin = 0; begin < count; begin += grain) {
      body(begin, begin + grain < count ? begin + grain : count, int32_t{0});
    }
    return;
  }
  struct State {
    std::atomic<int64_t> next{0};
    int64_t count;
    int64_t grain;
    const Body* body;
  } state{{}, count, grain, &body};
  executor.run({.invoke =
                    [](void* opaque, int32_t worker) noexcept {
                      auto& work = *static_cast<State*>(opaque);
                      while (true) {
                        const int64_t begin =
                            work.next.fetch_add(work.grain, std::memory_order_relaxed);
                        if (begin >= work.count) return;
                        const int64_t end = begin + work.grain;
                        (*work.body)(begin, end < work.count ? end : work.count, worker);
                      }
                    },
                .state = &state});
}

// Does what parallel_for does, for work that may throw (loading, packing): the first exception
// stops the rest and is rethrown on the calling thread.
template <class Body>
void parallel_for_throwing(Executor& executor, int64_t count, int64_t grain, const Body& body) {
  std::exception_ptr first;
  std::atomic<bool> failed{false};
  std::atomic_flag stored = ATOMIC_FLAG_INIT;
  parallel_for(executor, count, grain, [&](int64_t begin, int64_t end, int32_t worker) noexcept {
    if (failed.load(std::memory_order_relaxed)) return;
    try {
      body(begin, end, worker);
    } catch (...) {
      failed.store(true, std::memory_order_relaxed);
      if (!stored.test_and_set(std::memory_order_relaxed)) first = std::current_exception();
    }
  });
  if (first) std::rethrow_exception(first);
}

}  // namespace conclave::inline v0::cpu

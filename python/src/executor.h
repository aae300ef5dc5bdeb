// The threads of a Python process: one pool, of as many threads as PyTorch or the user says at the
// time, made anew in a forked child.
#pragma once

#include "conclave/context.h"

#include <atomic>
#include <cstdint>
#include <memory>

namespace conclave::python {

class OpenMpThreads;

// While one that `applies` lives, tasks of its thread run there, one worker after the other: for
// calls so short that waking other threads takes longer, and on a busy machine far longer.
class AloneScope {
 public:
  explicit AloneScope(bool applies) noexcept;
  ~AloneScope();
  AloneScope(const AloneScope&) = delete;
  AloneScope& operator=(const AloneScope&) = delete;

 private:
  bool former_;
};

// Layers plan for concurrency(), which is constant; fewer threads share its workers out among
// themselves. So the number may change while layers live, and results do not change with it.
class SharedExecutor final : public Executor {
 public:
  // Plans for `max_threads`, or for the CPUs this process may use if that is 0.
  explicit SharedExecutor(int32_t max_threads = 0);
  ~SharedExecutor() override;

  int32_t concurrency() const noexcept override { return concurrency_; }
  void run(ParallelTask task) override;

  // 1 to concurrency(): more threads than that are cut to it.
  void set_num_threads(int32_t num_threads);
  int32_t num_threads() const noexcept { return wanted_.load(std::memory_order_relaxed); }
  // From now on runs on the threads of the OpenMP runtime that is loaded, if there is one.
  void use_openmp();
  bool uses_openmp() const noexcept { return openmp_.load() != nullptr; }

 private:
  struct Pool;
  std::shared_ptr<Pool> current_pool();

  int32_t concurrency_;
  std::atomic<int32_t> wanted_;
  std::atomic<const OpenMpThreads*> openmp_{nullptr};
  std::shared_ptr<Pool> pool_;
};

}  // namespace conclave::python

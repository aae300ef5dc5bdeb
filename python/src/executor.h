// The threads of a Python process: one pool with as many threads as PyTorch or the user currently
// asks for, created anew in a forked child.
#pragma once

#include "conclave/context.h"

#include <atomic>
#include <cstdint>
#include <memory>

namespace conclave::python {

class OpenMpThreads;

// While one that `applies` lives, its thread runs tasks alone, one worker after the other: for
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

// Layers plan for concurrency(), which is constant; fewer threads share these workers. So the
// number of threads may change while layers live, and results do not change with it.
class SharedExecutor final : public Executor {
 public:
  // Plans for `max_threads`; 0 stands for the CPUs that this process may use.
  explicit SharedExecutor(int32_t max_threads = 0);
  ~SharedExecutor() override;

  int32_t concurrency() const noexcept override { return concurrency_; }
  void run(ParallelTask task) override;

  // The number is clamped to 1 to concurrency().
  void set_num_threads(int32_t num_threads);
  int32_t num_threads() const noexcept { return wanted_.load(std::memory_order_relaxed); }
  // From now on, tasks run on the threads of the loaded OpenMP runtime, if there is one.
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

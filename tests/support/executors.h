// Executors for tests: one runs workers one after another, one starts real threads.
#pragma once

#include "conclave/context.h"

#include <cstdint>
#include <thread>
#include <vector>

namespace conclave::testing {

// Runs `workers` workers on the calling thread, the last one first: results must not depend on the
// order.
class SerialExecutor final : public Executor {
 public:
  explicit SerialExecutor(int32_t workers = 1) : workers_(workers) {}
  int32_t concurrency() const noexcept override { return workers_; }
  void run(ParallelTask task) override {
    for (int32_t worker = workers_ - 1; worker >= 0; --worker) task.invoke(task.state, worker);
  }

 private:
  int32_t workers_;
};

// Starts a new thread per worker and call: slow, simple, and visible to ThreadSanitizer.
class ThreadExecutor final : public Executor {
 public:
  explicit ThreadExecutor(int32_t workers) : workers_(workers) {}
  int32_t concurrency() const noexcept override { return workers_; }
  void run(ParallelTask task) override {
    std::vector<std::thread> threads;
    for (int32_t worker = 1; worker < workers_; ++worker) {
      threads.emplace_back([task, worker] { task.invoke(task.state, worker); });
    }
    task.invoke(task.state, 0);
    for (std::thread& thread : threads) thread.join();
  }

 private:
  int32_t workers_;
};

}  // namespace conclave::testing

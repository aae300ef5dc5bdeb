// The library's own threads. docs/adr/0007-own-thread-pool.md says why.
#pragma once

#include "cpu/parking_word.h"

#include "conclave/context.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <pthread.h>
#include <vector>

namespace conclave::inline v0::cpu {

// The caller of run() is worker 0; thread i is always worker i. A region costs one store to start
// and one counter to finish; threads that find no work spin, then sleep. run() from inside a region
// of the same pool executes all workers one after another on the calling thread; run() from several
// threads takes turns. In a forked child run() throws Error(kForked), since its threads do not
// exist there.
class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(const ThreadPoolOptions& options);
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int32_t concurrency() const noexcept override { return concurrency_; }
  void run(ParallelTask task) override;

 private:
  // One executing region, known to every thread in it. `outer` is the region around the caller.
  struct Region {
    const ThreadPool* pool;
    const Region* outer;
    ParallelTask task;
  };
  struct Thread {
    ThreadPool* pool;
    int32_t worker;
    pthread_t handle;
  };
  // The last region in which a thread took this worker. Each has a cache line of its own.
  struct alignas(64) Claim {
    std::atomic<uint32_t> generation{0};
  };

  void start(Thread& thread, bool pin, const std::vector<int32_t>& cpus);
  void stop() noexcept;
  void serve(int32_t worker) noexcept;
  bool claim(int32_t worker, uint32_t generation) noexcept;
  void take_over(const Region& region, uint32_t generation) noexcept;
  bool inside_own_region() const noexcept;
  static void* thread_main(void* thread) noexcept;

  static thread_local const Region* current_region_;

  const int32_t concurrency_;
  const uint64_t fork_count_;
  std::chrono::nanoseconds spin_{0};
  std::vector<Thread> threads_;
  std::vector<Claim> claims_;  // by worker
  std::atomic<bool> stopping_{false};
  std::mutex turn_;
  // Written before generation_ announces it; read only by threads that claimed a worker of it.
  const Region* region_ = nullptr;
  // These lie apart: every thread reads the first while finishing threads write the second.
  alignas(64) ParkingWord generation_;
  alignas(64) ParkingWord unfinished_;
};

}  // namespace conclave::inline v0::cpu

#include "executor.h"

#include "openmp.h"
#include "per_process.h"

#include <algorithm>
#include <mutex>
#include <pthread.h>
#include <utility>
#include <vector>

namespace conclave::python {
namespace {

// Guards every executor's pool_. It is held over fork, so that the child finds it free.
std::mutex& pools_mutex() {
  static std::mutex mutex;
  return mutex;
}
std::atomic<uint64_t> forks{0};
thread_local bool runs_alone = false;

void follow_forks() {
  static const int registered =
      pthread_atfork([] { pools_mutex().lock(); }, [] { pools_mutex().unlock(); },
                     [] {
                       forks.fetch_add(1);
                       pools_mutex().unlock();
                     });
  static_cast<void>(registered);
}

// Each worker of the pool runs every `stride`-th of the workers that layers planned for.
struct Spread {
  ParallelTask task;
  int32_t stride;
  int32_t count;
};

void run_spread(void* state, int32_t worker) noexcept {
  const auto& spread = *static_cast<const Spread*>(state);
  for (int32_t i = worker; i < spread.count; i += spread.stride) {
    spread.task.invoke(spread.task.state, i);
  }
}

}  // namespace

AloneScope::AloneScope(bool applies) noexcept : former_(runs_alone) {
  runs_alone = runs_alone || applies;
}

AloneScope::~AloneScope() { runs_alone = former_; }

uint64_t fork_count() noexcept {
  follow_forks();
  return forks.load(std::memory_order_relaxed);
}

struct SharedExecutor::Pool {
  std::unique_ptr<Executor> executor;
  uint64_t fork;
};

SharedExecutor::SharedExecutor(int32_t max_threads) {
  pool_ = std::make_shared<Pool>(
      Pool{.executor = make_thread_pool({.num_threads = max_threads}), .fork = fork_count()});
  concurrency_ = pool_->executor->concurrency();
  wanted_ = concurrency_;
}

SharedExecutor::~SharedExecutor() = default;

void SharedExecutor::set_num_threads(int32_t num_threads) {
  wanted_.store(std::clamp(num_threads, 1, concurrency_), std::memory_order_relaxed);
}

std::shared_ptr<SharedExecutor::Pool> SharedExecutor::current_pool() {
  const int32_t wanted = num_threads();
  std::shared_ptr<Pool> replaced;
  const std::lock_guard lock(pools_mutex());
  const bool is_forked = pool_->fork != fork_count();
  if (!is_forked && pool_->executor->concurrency() == wanted) return pool_;
  replaced = std::exchange(
      pool_, std::make_shared<Pool>(Pool{.executor = make_thread_pool({.num_threads = wanted}),
                                         .fork = fork_count()}));
  // Its threads stayed in the parent: there is nothing to join, and its locks may be held forever.
  if (is_forked) new std::shared_ptr<Pool>(std::move(replaced));
  return pool_;
}

void SharedExecutor::use_openmp() {
  const OpenMpThreads* threads = OpenMpThreads::find();
  openmp_.store(threads, std::memory_order_release);
}

void SharedExecutor::run(ParallelTask task) {
  if (runs_alone) {
    for (int32_t worker = 0; worker < concurrency_; ++worker) task.invoke(task.state, worker);
    return;
  }
  const OpenMpThreads* const openmp = openmp_.load(std::memory_order_acquire);
  // The OpenMP runtime does not work in a forked child whose parent has used it.
  if (openmp != nullptr && fork_count() == 0) {
    return openmp->run(task, concurrency_, num_threads());
  }
  const std::shared_ptr<Pool> pool = current_pool();
  const int32_t threads = pool->executor->concurrency();
  if (threads == concurrency_) return pool->executor->run(task);
  Spread spread{.task = task, .stride = threads, .count = concurrency_};
  pool->executor->run({.invoke = run_spread, .state = &spread});
}

}  // namespace conclave::python

#include "cpu/thread_pool.h"

#include "cpu/fork_count.h"
#include "cpu/topology.h"

#include "conclave/error.h"

#include <memory>
#include <sched.h>
#include <signal.h>
#include <string>
#include <system_error>

namespace conclave::inline v0::cpu {
namespace {

constexpr int32_t kMaxThreads = 4096;
// Longer than the serial stretch between two regions of a forward, shorter than a reader notices.
constexpr std::chrono::microseconds kSpin{80};

int32_t resolve_concurrency(int32_t requested) {
  if (requested == 0) return std::min(usable_cpu_count(), kMaxThreads);
  if (requested < 0 || requested > kMaxThreads) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "number of threads out of range",
                                              .expected = "0 for all usable CPUs, or 1 and more",
                                              .found = std::to_string(requested),
                                              .limit = std::to_string(kMaxThreads)});
  }
  return requested;
}

[[noreturn]] void throw_thread_failed(int error, int32_t worker, int32_t concurrency) {
  throw Error(ErrorCode::kOutOfMemory,
              {.what = "cannot start thread " + std::to_string(worker + 1) + " of " +
                       std::to_string(concurrency) + ": " + std::system_category().message(error),
               .hint = "ask for fewer threads or raise the limit of processes"});
}

// Signals are for the application's own threads: ours start with all of them blocked.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t saved_;
};

void pin(pthread_t thread, int32_t cpu) noexcept {
  if (cpu >= CPU_SETSIZE) return;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(static_cast<size_t>(cpu), &mask);
  // This is only a wish: a container may forbid it, and the pool works without.
  pthread_setaffinity_np(thread, sizeof(mask), &mask);
}

}  // namespace

thread_local const ThreadPool::Region* ThreadPool::current_region_ = nullptr;

ThreadPool::ThreadPool(const ThreadPoolOptions& options)
    : concurrency_(resolve_concurrency(options.num_threads)),
      fork_count_(fork_count()),
      claims_(static_cast<size_t>(concurrency_)) {
  const std::vector<int32_t> cpus = affinity_cpus();
  // With more threads than CPUs a spinning thread keeps a working one from running.
  if (concurrency_ <= static_cast<int32_t>(cpus.size())) spin_ = kSpin;
  threads_.reserve(static_cast<size_t>(concurrency_) - 1);
  const SignalsBlocked signals_blocked;
  for (int32_t worker = 1; worker < concurrency_; ++worker) {
    threads_.push_back({.pool = this, .worker = worker, .handle = {}});
    start(threads_.back(), options.pin_threads, cpus);
  }
}

void ThreadPool::start(Thread& thread, bool pin_thread, const std::vector<int32_t>& cpus) {
  const int32_t worker = thread.worker;
  const int error = pthread_create(&thread.handle, nullptr, thread_main, &thread);
  if (error != 0) {
    threads_.pop_back();
    stop();
    throw_thread_failed(error, worker, concurrency_);
  }
  pthread_setname_np(thread.handle, ("conclave-" + std::to_string(worker)).c_str());
  if (pin_thread) pin(thread.handle, cpus[static_cast<size_t>(worker) % cpus.size()]);
}

ThreadPool::~ThreadPool() {
  // In a forked child there is nothing to join.
  if (fork_count() == fork_count_) stop();
}

void ThreadPool::stop() noexcept {
  stopping_.store(true, std::memory_order_relaxed);
  generation_.add(1);
  for (const Thread& thread : threads_) pthread_join(thread.handle, nullptr);
}

void ThreadPool::run(ParallelTask task) {
  if (fork_count() != fork_count_) {
    throw Error(
        ErrorCode::kForked,
        ErrorDetail{.what = "a thread pool was used in a forked child of the process that made it",
                    .hint = "create the context and its layers after fork"});
  }
  if (threads_.empty() || inside_own_region()) {
    for (int32_t worker = 0; worker < concurrency_; ++worker) task.invoke(task.state, worker);
    return;
  }
  const std::lock_guard<std::mutex> turn(turn_);
  const Region region{.pool = this, .outer = current_region_, .task = task};
  region_ = &region;
  unfinished_.reset(static_cast<uint32_t>(threads_.size()));
  const uint32_t generation = generation_.add(1);
  current_region_ = &region;
  task.invoke(task.state, 0);
  take_over(region, generation);
  current_region_ = region.outer;
  unfinished_.wait_for_zero(spin_);
}

void ThreadPool::take_over(const Region& region, uint32_t generation) noexcept {
  for (int32_t worker = 1; worker < concurrency_ && unfinished_.load() != 0; ++worker) {
    if (!claim(worker, generation)) continue;
    region.task.invoke(region.task.state, worker);
    unfinished_.count_down();
  }
}

// Each region takes each worker once, so the claim steps from one generation to the next and a
// thread that comes too late finds a later one than it expects.
bool ThreadPool::claim(int32_t worker, uint32_t generation) noexcept {
  std::atomic<uint32_t>& last = claims_[static_cast<size_t>(worker)].generation;
  uint32_t expected = generation - 1;
  return last.load(std::memory_order_relaxed) == expected &&
         last.compare_exchange_strong(expected, generation, std::memory_order_relaxed);
}

void ThreadPool::serve(int32_t worker) noexcept {
  uint32_t generation = 0;
  while (true) {
    generation = generation_.wait_while(generation, spin_);
    if (stopping_.load(std::memory_order_relaxed)) return;
    if (!claim(worker, generation)) continue;
    const Region* region = region_;
    current_region_ = region;
    region->task.invoke(region->task.state, worker);
    current_region_ = nullptr;
    unfinished_.count_down();
  }
}

// A thread of another pool that works for a region inside ours counts too: if it waited for our
// turn, it would wait for itself.
bool ThreadPool::inside_own_region() const noexcept {
  for (const Region* region = current_region_; region != nullptr; region = region->outer) {
    if (region->pool == this) return true;
  }
  return false;
}

void* ThreadPool::thread_main(void* thread) noexcept {
  const Thread& self = *static_cast<const Thread*>(thread);
  self.pool->serve(self.worker);
  return nullptr;
}

}  // namespace conclave::inline v0::cpu

namespace conclave::inline v0 {

std::unique_ptr<Executor> make_thread_pool(const ThreadPoolOptions& options) {
  return std::make_unique<cpu::ThreadPool>(options);
}

}  // namespace conclave::inline v0

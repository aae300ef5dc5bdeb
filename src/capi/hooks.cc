#include "capi/hooks.h"

#include "capi/guard.h"
#include "capi/structs.h"
#include "capi/values.h"

#include "conclave/error.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0::capi {
namespace {

constexpr int32_t kMaxConcurrency = 1024;

conclave_allocator checked(const conclave_allocator& allocator, const char* name) {
  const std::string prefix = name;
  required(allocator.allocate, (prefix + ".allocate").c_str());
  required(allocator.deallocate, (prefix + ".deallocate").c_str());
  return allocator;
}

// Memory that is not aligned as it was asked for would be written beyond its bounds.
void* aligned_memory(const conclave_allocator& allocator, size_t bytes, size_t alignment,
                     void* stream) {
  void* const data = allocator.allocate(allocator.user, bytes, alignment, stream);
  if (reinterpret_cast<uintptr_t>(data) % alignment == 0) return data;
  allocator.deallocate(allocator.user, data, bytes, stream);
  throw Error(ErrorCode::kMisaligned, {.what = "the allocator's memory is not aligned",
                                       .tensor = "allocate",
                                       .expected = "a multiple of " + std::to_string(alignment)});
}

}  // namespace

// One call of `run`, as its workers see it.
struct CExecutor::Run {
  ParallelTask task;
  std::atomic<bool>* has_run;
  int32_t concurrency;
  std::atomic<int32_t> done = 0;
  std::atomic<bool> is_wrong = false;

  static void invoke(void* state, int32_t worker) {
    Run& run = *static_cast<Run*>(state);
    if (worker < 0 || worker >= run.concurrency || run.has_run[worker].exchange(true)) {
      run.is_wrong = true;
      return;
    }
    run.task.invoke(run.task.state, worker);
    ++run.done;
  }
};

CExecutor::CExecutor(const conclave_executor& executor) : executor_(executor) {
  required(executor.run, "executor.run");
  if (executor.concurrency < 1 || executor.concurrency > kMaxConcurrency) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "an executor has another number of workers",
                                              .tensor = "executor.concurrency",
                                              .found = std::to_string(executor.concurrency),
                                              .limit = "1 to " + std::to_string(kMaxConcurrency)});
  }
  check_choice("executor.reserved", executor.reserved, 0);
  has_run_ = std::make_unique<std::atomic<bool>[]>(static_cast<size_t>(executor.concurrency));
}

void CExecutor::run(ParallelTask task) {
  std::fill_n(has_run_.get(), executor_.concurrency, false);
  Run state{.task = task, .has_run = has_run_.get(), .concurrency = executor_.concurrency};
  executor_.run(executor_.user, &Run::invoke, &state);
  if (state.done == executor_.concurrency && !state.is_wrong) return;
  throw Error(ErrorCode::kState,
              {.what = "the executor did not run each worker exactly once",
               .tensor = "executor.run",
               .expected = std::to_string(executor_.concurrency) + " workers",
               .found = std::to_string(state.done) + (state.is_wrong ? ", and others" : "")});
}

CHostAllocator::CHostAllocator(const conclave_allocator& allocator, const char* name)
    : allocator_(checked(allocator, name)) {}

void* CHostAllocator::allocate(size_t bytes, size_t alignment) {
  return aligned_memory(allocator_, bytes, alignment, nullptr);
}

void CHostAllocator::deallocate(void* data, size_t bytes) noexcept {
  allocator_.deallocate(allocator_.user, data, bytes, nullptr);
}

CDeviceAllocator::CDeviceAllocator(const conclave_allocator& allocator, const char* name)
    : allocator_(checked(allocator, name)) {}

void* CDeviceAllocator::allocate(size_t bytes, size_t alignment, Stream stream) {
  return aligned_memory(allocator_, bytes, alignment, stream.handle);
}

void CDeviceAllocator::deallocate(void* data, size_t bytes, Stream stream) noexcept {
  allocator_.deallocate(allocator_.user, data, bytes, stream.handle);
}

void CLog::log(LogLevel level, std::string_view message) {
  if (log_.message == nullptr) return;
  log_.message(log_.user, static_cast<int32_t>(level), std::string(message).c_str());
}

void CLog::progress(std::string_view phase, int64_t done, int64_t total) {
  if (log_.progress != nullptr) {
    log_.progress(log_.user, std::string(phase).c_str(), done, total);
  }
  if (log_.should_end == nullptr) return;
  const conclave_status status = log_.should_end(log_.user);
  if (status == CONCLAVE_OK) return;
  throw Error(find_code(status).value_or(ErrorCode::kCancelled),
              {.what = "the caller's function ended the work",
               .tensor = "log.should_end",
               .found = "status " + std::to_string(status)});
}

}  // namespace conclave::inline v0::capi

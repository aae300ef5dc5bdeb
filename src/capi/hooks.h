// An application's threads, memory and log, given as functions of C.
#pragma once

#include "conclave/c/context.h"
#include "conclave/context.h"

#include <atomic>
#include <cstddef>
#include <memory>
#include <string_view>

namespace conclave::inline v0::capi {

class CExecutor final : public Executor {
 public:
  // Throws Error(kNullPointer, kInvalidArgument).
  explicit CExecutor(const conclave_executor& executor);
  int32_t concurrency() const noexcept override { return executor_.concurrency; }
  // Throws Error(kState) for workers that were missed, repeated or made up.
  void run(ParallelTask task) override;

 private:
  struct Run;
  conclave_executor executor_;
  std::unique_ptr<std::atomic<bool>[]> has_run_;
};

class CHostAllocator final : public HostAllocator {
 public:
  CHostAllocator(const conclave_allocator& allocator, const char* name);
  // Throws Error(kMisaligned).
  void* allocate(size_t bytes, size_t alignment) override;
  void deallocate(void* data, size_t bytes) noexcept override;

 private:
  conclave_allocator allocator_;
};

class CDeviceAllocator final : public DeviceAllocator {
 public:
  CDeviceAllocator(const conclave_allocator& allocator, const char* name);
  void* allocate(size_t bytes, size_t alignment, Stream stream) override;
  void deallocate(void* data, size_t bytes, Stream stream) noexcept override;

 private:
  conclave_allocator allocator_;
};

class CLog final : public LogSink {
 public:
  explicit CLog(const conclave_log& log) : log_(log) {}
  void log(LogLevel level, std::string_view message) override;
  void progress(std::string_view phase, int64_t done, int64_t total) override;

 private:
  conclave_log log_;
};

}  // namespace conclave::inline v0::capi

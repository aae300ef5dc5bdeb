// Everything a layer needs from its surroundings: device, threads, memory, log, communicator,
// routers. Passed by reference; there is no global state.
#pragma once

#include "conclave/comm.h"
#include "conclave/routing.h"
#include "conclave/stream.h"
#include "conclave/version.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace conclave::inline v0 {

// A call that several workers execute together. It is a plain function and a pointer, so that no
// call allocates and a C host can provide one.
struct ParallelTask {
  void (*invoke)(void* state, int32_t worker) noexcept = nullptr;
  void* state = nullptr;
};

// Runs tasks on threads. Implement it to lend the library an application's own threads.
class CONCLAVE_API Executor {
 public:
  virtual ~Executor() = default;
  // Constant for the executor's life, >= 1.
  virtual int32_t concurrency() const noexcept = 0;
  // Invokes task(worker) exactly once for each worker in [0, concurrency()) and returns when all
  // have returned. Workers may run one after another: tasks never wait for each other.
  // A context calls it from one thread at a time; two contexts that share one do not wait for each
  // other.
  virtual void run(ParallelTask task) = 0;
};

// A pool of `num_threads` threads, the calling thread being one of them; the others spin briefly
// between tasks, then sleep. Threads are pinned only if `pin_threads`.
struct ThreadPoolOptions {
  int32_t num_threads = 0;  // 0: the CPUs this process may use
  bool pin_threads = false;
};
CONCLAVE_API std::unique_ptr<Executor> make_thread_pool(const ThreadPoolOptions& options = {});

class CONCLAVE_API HostAllocator {
 public:
  virtual ~HostAllocator() = default;
  // Returns null, or throws std::bad_alloc, when there is no memory. `alignment` is a power of two.
  virtual void* allocate(size_t bytes, size_t alignment) = 0;
  virtual void deallocate(void* data, size_t bytes) noexcept = 0;
};

// Source of an application's own device memory, such as a framework's caching allocator. Called in
// create, reload, Workspace and DeviceQueue, never in forward.
class CONCLAVE_API DeviceAllocator {
 public:
  virtual ~DeviceAllocator() = default;
  // Memory of the context's device for work enqueued on `stream` from now on; without a stream, for
  // work of any stream. Returns null, or throws std::bad_alloc, when there is none. `alignment` is
  // a power of two, at most 512.
  virtual void* allocate(size_t bytes, size_t alignment, Stream stream) = 0;
  // Work already on `stream` may still use the memory; without a stream no work does.
  virtual void deallocate(void* data, size_t bytes, Stream stream) noexcept = 0;
};

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError };

// Receives the library's messages and the progress of long work (loading, packing).
// Called from any thread, never during forward.
class CONCLAVE_API LogSink {
 public:
  virtual ~LogSink() = default;
  virtual void log(LogLevel level, std::string_view message) = 0;
  // `done` of `total` bytes of `phase` are finished. Calls may come out of order. What it throws,
  // such as Error(kCancelled), ends the work and is thrown to the caller, who has made nothing.
  virtual void progress(std::string_view phase, int64_t done, int64_t total);
};

// Null members select the library's own. Objects given must outlive the context.
struct ContextOptions {
  std::string device = {};  // "cpu", "cuda" or "cuda:1"; empty: "cpu"
  int32_t num_threads = 0;  // for the library's own pool; ignored with an executor
  bool pin_threads = false;
  std::string isa =
      {};  // "scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"; empty: best
  Executor* executor = nullptr;
  HostAllocator* host_allocator = nullptr;
  DeviceAllocator* device_allocator = nullptr;  // ignored on "cpu"
  LogSink* log = nullptr;
  Communicator* communicator = nullptr;         // needed when ep_size > 1 and Reduce::kFull
  Communicator* tensor_communicator = nullptr;  // needed when tp_size > 1 and Reduce::kFull
};

using RouterFactory = std::function<std::unique_ptr<Router>(const MoeSpec& spec)>;

// Layers keep a pointer to their context: it must outlive them and must not be moved while one
// exists. Creating layers from one context in several threads is safe; forwards that share its
// executor take turns region by region.
class CONCLAVE_API Context {
 public:
  // Throws Error: kInvalidArgument or kUnknownName naming the field; kUnsupported for an
  // instruction set or a device that this build or machine lacks; kDevice if the driver refuses.
  explicit Context(ContextOptions options = {});
  // Reads CONCLAVE_DEVICE, CONCLAVE_NUM_THREADS (else OMP_NUM_THREADS), CONCLAVE_ISA and
  // CONCLAVE_PIN_THREADS; values set in `options` come first. No other part of the library reads
  // the environment.
  static Context from_environment(ContextOptions options = {});
  Context(Context&&) noexcept;
  Context& operator=(Context&&) noexcept;
  ~Context();

  // "cpu", or "cuda:0" with its number.
  const std::string& device() const noexcept;
  Executor& executor() const noexcept;
  HostAllocator& host_allocator() const noexcept;
  // The allocator given, or the library's own; null on "cpu".
  DeviceAllocator* device_allocator() const noexcept;
  Communicator* communicator() const noexcept;
  Communicator* tensor_communicator() const noexcept;
  // The forced instruction set; empty: the best usable one is chosen.
  const std::string& isa() const noexcept;
  void log(LogLevel level, std::string_view message) const;
  void progress(std::string_view phase, int64_t done, int64_t total) const;

  // Makes `name` usable in RouterSpec::name. Throws Error(kInvalidArgument) if it is taken.
  void add_router(std::string name, RouterFactory factory);
  // The factory of an added router, or null.
  const RouterFactory* find_router(std::string_view name) const noexcept;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace conclave::inline v0

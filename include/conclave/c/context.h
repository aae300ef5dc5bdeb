// C interface: the surroundings of a layer, which are device, threads, memory and log.
#pragma once

#include "conclave/c/communicator.h"

#if defined(__cplusplus)
extern "C" {
#endif

// Device, threads, memory and ranks of layers. Layers hold their context. Creating layers of one
// context in several threads is safe; forwards that share its threads take turns.
typedef struct conclave_context conclave_context;

typedef void (*conclave_task)(void* state, int32_t worker);

// An application's own threads. `run` calls task(state, worker) exactly once for each worker in
// [0, concurrency), in any order and on any threads, and returns when all have returned; it is
// called from one thread at a time. A run that misses a worker, repeats one or names another ends
// the call that it served with CONCLAVE_ERROR_STATE. `user` and the threads outlive the context
// and all that holds it.
typedef struct conclave_executor {
  size_t struct_size;
  void* user;
  void (*run)(void* user, conclave_task task, void* state);
  int32_t concurrency;  // 1 to 1024
  int32_t reserved;     // 0
} conclave_executor;

// An application's own memory, of the host or of a device. `allocate` returns NULL where there is
// none; `alignment` is a power of two. `stream` is NULL for memory of the host, and for work of
// any stream. Called from any thread, never in a forward. `user` outlives all that was allocated.
typedef struct conclave_allocator {
  size_t struct_size;
  void* user;
  void* (*allocate)(void* user, size_t bytes, size_t alignment, void* stream);
  void (*deallocate)(void* user, void* data, size_t bytes, void* stream);
} conclave_allocator;

enum {
  CONCLAVE_LOG_DEBUG = 0,
  CONCLAVE_LOG_INFO = 1,
  CONCLAVE_LOG_WARNING = 2,
  CONCLAVE_LOG_ERROR = 3
};
// Receives messages, and the progress of long work: `done` of `total` bytes of `phase`. Either may
// be NULL. Called from any thread, never in a forward; texts live during the call.
typedef struct conclave_log {
  size_t struct_size;
  void* user;
  void (*message)(void* user, int32_t level, const char* text);
  void (*progress)(void* user, const char* phase, int64_t done, int64_t total);
  // Asked where progress is told, or would be, whether long work should go on; or NULL. A status
  // other than CONCLAVE_OK ends it, so that nothing is made, and is that of the call; a number that
  // is no status becomes CONCLAVE_ERROR_CANCELLED.
  conclave_status (*should_end)(void* user);
} conclave_log;

enum {
  CONCLAVE_CONTEXT_PIN_THREADS = 1,
  // Reads CONCLAVE_DEVICE, CONCLAVE_NUM_THREADS (else OMP_NUM_THREADS), CONCLAVE_ISA and
  // CONCLAVE_PIN_THREADS for what the options leave out. Nothing else here reads the environment.
  CONCLAVE_CONTEXT_FROM_ENVIRONMENT = 2
};

// NULL and 0 select the library's own. Structs that are pointed to are copied.
typedef struct conclave_context_options {
  size_t struct_size;
  const char* device;   // "cpu", "cuda" or "cuda:1"; NULL: "cpu"
  const char* isa;      // "scalar", "avx2", "avx512", ..., "amx"; NULL: the best one
  int32_t num_threads;  // 0: the CPUs that this process may use; unused with an executor
  uint32_t flags;       // CONCLAVE_CONTEXT_*
  const conclave_executor* executor;
  const conclave_allocator* host_allocator;
  const conclave_allocator* device_allocator;  // unused on "cpu"
  const conclave_log* log;
  conclave_communicator* communicator;  // joins ranks with equal tp_rank; the context holds it
  conclave_communicator* tensor_communicator;  // joins ranks with equal ep_rank; likewise
} conclave_context_options;

// `options` may be NULL. CONCLAVE_ERROR_INVALID_ARGUMENT and _UNKNOWN_NAME name the field;
// _UNSUPPORTED for a device or an instruction set that this build or machine lacks; _DEVICE.
CONCLAVE_C_API conclave_status conclave_context_create(
    const conclave_context_options* options, conclave_context** context) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API void conclave_context_destroy(conclave_context* context) CONCLAVE_C_NOTHROW;
// "cpu", or "cuda:0" with its number; lives as long as the context.
CONCLAVE_C_API conclave_status conclave_context_device(const conclave_context* context,
                                                       const char** device) CONCLAVE_C_NOTHROW;

// A JSON list of devices and libraries that this build can or cannot use beside the CPU, and why:
// [{"name": "cuda", "usable": false, "reason": "..."}]. Free it with conclave_text_free.
CONCLAVE_C_API conclave_status conclave_backends_json(char** json) CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif

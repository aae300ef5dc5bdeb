// C interface: how ranks meet, which exchange rows and sums.
#pragma once

#include "conclave/c/tensor.h"

#if defined(__cplusplus)
extern "C" {
#endif

// One rank of a group of threads or processes. Contexts hold it. Collective calls are made by all
// ranks in the same order, at most by one thread of each. Every wait has a deadline; a rank that is
// lost, late or in disagreement is CONCLAVE_ERROR_COMM_* on all that wait for it, with the rank in
// conclave_error::peer. After an error the communicator can only be asked for survivors and
// ended. Ending one makes the waits of its peers fail.
typedef struct conclave_communicator conclave_communicator;

// Joins ranks as threads of this process: fills out[0] to out[num_ranks - 1], one for each thread.
// `timeout_ms` is that of each wait; 0: 30 s. CONCLAVE_ERROR_INVALID_ARGUMENT.
CONCLAVE_C_API conclave_status conclave_local_group(int32_t num_ranks, int64_t timeout_ms,
                                                    conclave_communicator** out) CONCLAVE_C_NOTHROW;

enum { CONCLAVE_CONNECT_HAS_GROUP = 1 };  // `group` counts

// How a rank in a process of its own joins its group.
typedef struct conclave_connect_options {
  size_t struct_size;
  int32_t rank;  // below size; with size 0 both are left to the transport's launcher: rank is 0
  int32_t size;
  const char* meeting_point;  // in the transport's own words ("host:port" of tcp), or NULL
  // The same ranks, connected before, over which they tell each other what they need; or NULL.
  conclave_communicator* bootstrap;
  // The same over whatever else the ranks share, or NULL; needs a size. Is given this rank's text
  // and sets all[r] to that of each rank, texts that live until it is called again or the
  // connecting call returns. Called several times, by every rank as often. Returns CONCLAVE_OK, or
  // another status, which the connecting call then returns.
  conclave_status (*exchange)(void* user, const char* mine, int32_t num_ranks, const char** all);
  void* exchange_user;
  int32_t group;  // not negative: splits a launcher's ranks; those with the same number join
  uint32_t flags;
  const char* device;  // whose memory it carries: "cuda:0"; NULL: "cpu"
  int64_t timeout_ms;  // for meeting, and of each wait; 0: 30 s
} conclave_connect_options;

// Collective. `transport` is "mpi", "tcp", "nccl" or "local"; conclave_transports_json lists those
// that this build has. `options` may be NULL. CONCLAVE_ERROR_UNKNOWN_NAME, _INVALID_ARGUMENT;
// _UNSUPPORTED with the reason; _COMM_* if a rank does not come.
CONCLAVE_C_API conclave_status conclave_connect(const char* transport,
                                                const conclave_connect_options* options,
                                                conclave_communicator** out) CONCLAVE_C_NOTHROW;
// Collective over an application's MPI_Comm, which `mpi_comm` points to and which is duplicated; it
// may be freed at once. MPI must be initialised, and be finalised after the result is ended.
// CONCLAVE_ERROR_UNSUPPORTED in builds without MPI.
CONCLAVE_C_API conclave_status conclave_communicator_from_mpi(
    const void* mpi_comm, int64_t timeout_ms, conclave_communicator** out) CONCLAVE_C_NOTHROW;
// Collective over an application's ncclComm_t, which is copied. `bootstrap` has the same ranks.
// CONCLAVE_ERROR_UNSUPPORTED in builds without CUDA. Ranks that share an id of NCCL only use
// conclave_connect("nccl"), which makes and shares one.
CONCLAVE_C_API conclave_status
conclave_communicator_from_nccl(void* nccl_comm, conclave_communicator* bootstrap,
                                int64_t timeout_ms, conclave_communicator** out) CONCLAVE_C_NOTHROW;
// From the thread that uses it.
CONCLAVE_C_API void conclave_communicator_destroy(conclave_communicator* communicator)
    CONCLAVE_C_NOTHROW;

typedef struct conclave_communicator_info {
  size_t struct_size;
  int32_t rank;
  int32_t size;
  int64_t timeout_ms;
  const char* transport;  // "local"; lives as long as the process, an own one as the communicator
} conclave_communicator_info;
CONCLAVE_C_API conclave_status conclave_communicator_get_info(
    const conclave_communicator* communicator, conclave_communicator_info* info) CONCLAVE_C_NOTHROW;

// Collective. `phase` names the step in errors; NULL: the call's own name.
CONCLAVE_C_API conclave_status conclave_communicator_barrier(conclave_communicator* communicator,
                                                             const char* phase) CONCLAVE_C_NOTHROW;
// Collective, host memory: `recv`, of size x bytes, takes the `bytes` bytes of every rank, in rank
// order. The two do not overlap.
CONCLAVE_C_API conclave_status
conclave_communicator_all_gather(conclave_communicator* communicator, const void* send, void* recv,
                                 size_t bytes, const char* phase) CONCLAVE_C_NOTHROW;
// Collective, host memory: `recv` takes the sums of `count` elements over ranks, in rank order.
// f32, f64, i32 or i64. The two do not overlap.
CONCLAVE_C_API conclave_status conclave_communicator_all_reduce(
    conclave_communicator* communicator, const void* send, void* recv, size_t count,
    conclave_dtype dtype, const char* phase) CONCLAVE_C_NOTHROW;
// Makes every present and later wait of every rank fail with CONCLAVE_ERROR_COMM_ABORTED. From any
// thread.
CONCLAVE_C_API conclave_status conclave_communicator_abort(conclave_communicator* communicator,
                                                           const char* reason) CONCLAVE_C_NOTHROW;
// The error that made it unusable, if one did. Waits for nothing.
CONCLAVE_C_API conclave_status conclave_communicator_check(conclave_communicator* communicator)
    CONCLAVE_C_NOTHROW;

// Goes on after a failure, with the ranks that are left: each calls it once. `timeout_ms` is the
// time for the others to come; 0: that of the communicator. `old_ranks`, of as many numbers as
// `failed` has ranks, takes for each new rank the one that it was; the new size says how many. May
// be NULL. CONCLAVE_ERROR_COMM_EXCLUDED for a rank that came too late; _UNSUPPORTED with the
// reason; _STATE where this rank has called before.
CONCLAVE_C_API conclave_status conclave_survivors(conclave_communicator* failed, int64_t timeout_ms,
                                                  conclave_communicator** out,
                                                  int32_t* old_ranks) CONCLAVE_C_NOTHROW;

// A JSON list of transports: [{"name": "tcp", "usable": true, "reason": "...",
// "meets_by_exchange": true, "device_kind": ""}]; `reason` says why not, or what its ranks are;
// ranks that meet by exchange may be started by anybody; `device_kind` is that of the devices whose
// memory it carries, one for each rank, "" the host. Free it with conclave_text_free.
CONCLAVE_C_API conclave_status conclave_transports_json(char** json) CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif

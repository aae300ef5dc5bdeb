// C interface: ranks that exchange bytes by an application's own means, given as functions of C.
#pragma once

#include "conclave/c/communicator.h"

#if defined(__cplusplus)
extern "C" {
#endif

typedef int32_t conclave_comm_kind;
enum {
  CONCLAVE_COMM_KIND_ALL_TO_ALL_V = 0,    // bytes to and from each rank, by counts and offsets
  CONCLAVE_COMM_KIND_ALL_GATHER = 1,      // recv has the send of every rank, in rank order
  CONCLAVE_COMM_KIND_ALL_REDUCE = 2,      // element by element over ranks, in rank order
  CONCLAVE_COMM_KIND_REDUCE_SCATTER = 3,  // block r of the reduced vector goes to rank r
  CONCLAVE_COMM_KIND_BARRIER = 4,
  CONCLAVE_COMM_KIND_SEND = 5,  // to `peer`, which may be this rank; in order, as RECV from it
  CONCLAVE_COMM_KIND_RECV = 6
};
typedef int32_t conclave_reduce_op;
enum { CONCLAVE_REDUCE_OP_SUM = 0, CONCLAVE_REDUCE_OP_MAX = 1 };

// An operation to start. Sizes, types, the peer and overlaps have been checked; buffers, counts and
// offsets live until its wait has returned, with a stream until that has passed. `send` and `recv`
// may be NULL where they have no bytes.
typedef struct conclave_comm_operation {
  size_t struct_size;  // the library's: it may be less than this program knows
  uint64_t number;     // wait and test name the operation by it: 1, 2, 3, ... on each rank
  conclave_comm_kind kind;
  int32_t peer;       // the other rank where it is SEND or RECV, otherwise -1
  const void* send;   // [send_bytes], for ALL_TO_ALL_V the base of its offsets
  size_t send_bytes;  // 0 for ALL_TO_ALL_V
  void* recv;         // [recv_bytes], likewise
  size_t recv_bytes;
  const int64_t* send_counts;   // [size], bytes for each rank; NULL but for ALL_TO_ALL_V
  const int64_t* send_offsets;  // [size], bytes from `send`
  const int64_t* recv_counts;   // [size]
  const int64_t* recv_offsets;  // [size]
  conclave_dtype dtype;         // the element of a reduction, otherwise 0
  conclave_reduce_op reduce;
  conclave_memory send_memory;
  conclave_memory recv_memory;
  void* stream;           // NULL, or what the operation follows (wait_on)
  int32_t in_background;  // 1: it advances between calls too, where the table has OVERLAP
  int32_t reserved;       // 0
} conclave_comm_operation;

// A function that fails may say more here before it returns.
typedef struct conclave_comm_failure {
  size_t struct_size;  // the library's: it may be less than this program knows
  int32_t peer;        // -1; may be set to the rank to blame
  int32_t reserved;    // 0
  const char* reason;  // NULL; may be set to a text that says why, and is copied at once
} conclave_comm_failure;

// Memory of equal size on each rank, which work of this rank on a device reads and writes.
typedef struct conclave_peer_window {
  size_t struct_size;   // the library's: it may be less than this program knows
  void* window;         // may be set; close_window is given it
  void* const* blocks;  // set to [size]: the block of each rank, copied at once
} conclave_peer_window;

enum {
  CONCLAVE_OWN_COMMUNICATOR_DEVICE_MEMORY = 1,  // also carries memory of the context's device
  CONCLAVE_OWN_COMMUNICATOR_OVERLAP = 2         // moves bytes while its rank calls nothing
};

// A transport of the application's own, one table on each rank. Memory of the host it always
// carries; what a NULL function would do is refused with CONCLAVE_ERROR_UNSUPPORTED.
//
// Threads: one at a time calls these functions, not always the same one; `abort` may come from any
// at any time. They do not call the library with objects that use this communicator.
//
// Time: a function that is given `deadline_ns` returns within so many nanoseconds, whatever its
// peers do, and then with CONCLAVE_ERROR_COMM_TIMEOUT and the rank that did not come. The others
// return at once. Nothing here can end a function that hangs.
//
// Errors: a status other than CONCLAVE_OK says that the communicator has failed. All that this rank
// had under way has then ended: its buffers are touched no more, by no peer either. The call of the
// library ends with that status, its rank and its phase; with CONCLAVE_ERROR_STATE where the number
// is no status. CONCLAVE_ERROR_COMM_PEER_LOST, _COMM_TIMEOUT, _COMM_MISMATCH where ranks disagree
// on operations, sizes or types, and _COMM_ABORTED are what the library expects, on every rank and
// each naming the culprit. Afterwards only `abort`, `shrink` and `release` are called.
typedef struct conclave_own_communicator {
  size_t struct_size;
  const char* name;  // says in errors which transport it is; copied
  void* user;
  int32_t rank;  // below size
  int32_t size;
  int64_t timeout_ms;  // each wait has it for which a caller says nothing else; 0: 30 s
  uint32_t flags;      // CONCLAVE_OWN_COMMUNICATOR_*
  uint32_t reserved;   // 0

  // Begins an operation and returns at once. Several may be under way, and all ranks start
  // collective ones in the same order. An error is told by the wait of the operation, whose phase
  // it gets. `operation` lives during the call, what it points to longer (see there).
  conclave_status (*start)(void* user, const conclave_comm_operation* operation,
                           conclave_comm_failure* failure);
  // Completes operation `number` on this rank. Each is waited for once, in any order: a wait moves
  // all that is under way, or ranks that wait in other orders block each other. `phase` names the
  // step, its first 127 bytes, and lives during the call.
  conclave_status (*wait)(void* user, uint64_t number, int64_t deadline_ns, const char* phase,
                          conclave_comm_failure* failure);
  // Sets *complete to 1 if the operation is complete, whose wait is still to come. Never blocks.
  conclave_status (*test)(void* user, uint64_t number, int32_t* complete, const char* phase,
                          conclave_comm_failure* failure);
  // Makes every present and later wait of every rank fail with CONCLAVE_ERROR_COMM_ABORTED and
  // this text, but for operations that are complete.
  void (*abort)(void* user, const char* reason);
  // Called once, when nothing calls another function any more, by the thread that ends the last
  // object that holds the communicator; or NULL. Waits of peers then fail.
  void (*release)(void* user);

  // The failure that nobody has waited for yet, if there is one. NULL: none is known.
  conclave_status (*check)(void* user, const char* phase, conclave_comm_failure* failure);
  // In place of `wait` for operations with a stream: what `stream` gets from now on follows the
  // operation, and the host does not wait. One that is late ends on the device, and `check` says
  // so. NULL: there are no operations with a stream.
  conclave_status (*wait_on)(void* user, void* stream, uint64_t number, int64_t deadline_ns,
                             const char* phase, conclave_comm_failure* failure);
  // Returns 1 for a reduction that it carries beside f32, f64, i32 and i64, which it always does,
  // and otherwise 0; or NULL.
  int32_t (*supports_reduction)(void* user, conclave_dtype dtype, conclave_reduce_op reduce);
  // Goes on after a failure with the ranks that are left, all of which get the same answer: sets
  // *left to this rank's table among them, copied at once, and writes to old_ranks, for each new
  // rank, the one that it was, ascending. CONCLAVE_ERROR_COMM_EXCLUDED on a rank that came too
  // late. Called once. Peers that wait for this rank fail with CONCLAVE_ERROR_COMM_ABORTED, so that
  // they come as well; operations that it has completed end on them as if it had not called.
  conclave_status (*shrink)(void* user, int64_t deadline_ns, const char* phase,
                            const struct conclave_own_communicator** left, int32_t* old_ranks,
                            conclave_comm_failure* failure);
  // Collective: a block of `bytes` bytes on each rank; both or neither.
  conclave_status (*open_window)(void* user, size_t bytes, conclave_memory memory,
                                 int64_t deadline_ns, const char* phase,
                                 conclave_peer_window* window, conclave_comm_failure* failure);
  void (*close_window)(void* user, void* window);
} conclave_own_communicator;

// A communicator of these functions, for contexts and all else that takes one. The table is copied.
// CONCLAVE_ERROR_NULL_POINTER naming the function, _INVALID_ARGUMENT naming the field; after any
// error nothing is kept, and `release` is not called.
CONCLAVE_C_API conclave_status conclave_communicator_from_own(
    const conclave_own_communicator* own, conclave_communicator** out) CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif

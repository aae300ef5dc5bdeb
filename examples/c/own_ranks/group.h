// Ranks that are threads, and how their operations meet. Nothing here is the library's but what
// conclave/c/own_communicator.h says an operation is.
#pragma once

#include <conclave/c.h>
#include <pthread.h>

enum { MOST_UNDER_WAY = 64, EVERYBODY = -1 };

// An operation from its start to its wait. Whoever starts last carries it out for all of them, as
// all buffers are known then; the others only wait.
typedef struct request {
  conclave_comm_operation operation;
  int32_t from;  // the two ends of a message, or EVERYBODY
  int32_t to;
  uint64_t order;  // counts what goes on between these ranks, equally on each of them
  int is_used;
  int is_complete;
} request;

typedef struct member {
  struct thread_group* group;
  int32_t rank;
  int has_left;
  uint64_t begun_by_all;
  uint64_t* sent;      // [size]: messages to each rank
  uint64_t* received;  // [size]
  request requests[MOST_UNDER_WAY];
} member;

// Everything below is read and written while the lock is held.
typedef struct thread_group {
  pthread_mutex_t lock;
  pthread_cond_t change;
  int32_t size;
  conclave_status failure;  // the first one stays
  int32_t culprit;
  char reason[128];
  member* members;    // [size]
  request** meeting;  // [size]: the operation on every rank that is being carried out
} thread_group;

// Ends all that is under way with this status, unless something has before.
conclave_status group_fail(thread_group* group, conclave_status status, int32_t culprit,
                           const char* reason);
// The status of the first failure, of which it says more in `failure`; CONCLAVE_OK without any.
conclave_status group_tell(const thread_group* group, conclave_comm_failure* failure);
// Carries an operation out once it is there on all ranks that take part in it. Returns the first
// rank where it is not, and -1 where it has met all.
int32_t group_meet(thread_group* group, const request* of);

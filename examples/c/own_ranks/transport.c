#define _POSIX_C_SOURCE 200809L

#include "transport.h"

#include "group.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static void number(member* me, request* made) {
  const conclave_comm_operation* const operation = &made->operation;
  made->from = made->to = EVERYBODY;
  if (operation->kind == CONCLAVE_COMM_KIND_SEND) {
    made->from = me->rank;
    made->to = operation->peer;
    made->order = me->sent[operation->peer]++;
  } else if (operation->kind == CONCLAVE_COMM_KIND_RECV) {
    made->from = operation->peer;
    made->to = me->rank;
    made->order = me->received[operation->peer]++;
  } else {
    made->order = me->begun_by_all++;
  }
}

static conclave_status start(void* user, const conclave_comm_operation* operation,
                             conclave_comm_failure* failure) {
  member* const me = user;
  thread_group* const group = me->group;
  conclave_status status;
  int i = 0;
  pthread_mutex_lock(&group->lock);
  while (i < MOST_UNDER_WAY && me->requests[i].is_used) ++i;
  if (group->failure == CONCLAVE_OK && i == MOST_UNDER_WAY) {
    group_fail(group, CONCLAVE_ERROR_UNSUPPORTED, me->rank,
               "more than 64 operations are under way");
  }
  if (group->failure == CONCLAVE_OK) {
    request* const made = &me->requests[i];
    const size_t known = sizeof made->operation;
    memset(made, 0, sizeof *made);
    // An older library has a shorter struct, a newer one a longer.
    memcpy(&made->operation, operation,
           operation->struct_size < known ? operation->struct_size : known);
    made->is_used = 1;
    number(me, made);
    group_meet(group, made);
  }
  status = group_tell(group, failure);
  pthread_mutex_unlock(&group->lock);
  return status;
}

static request* find_number(member* me, uint64_t number) {
  int i;
  for (i = 0; i < MOST_UNDER_WAY; ++i) {
    request* const at = &me->requests[i];
    if (at->is_used && at->operation.number == number) return at;
  }
  return NULL;
}

static struct timespec after(int64_t nanoseconds) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  at.tv_sec += (time_t)(nanoseconds / 1000000000);
  at.tv_nsec += (long)(nanoseconds % 1000000000);
  if (at.tv_nsec >= 1000000000) {
    at.tv_nsec -= 1000000000;
    ++at.tv_sec;
  }
  return at;
}

static conclave_status wait_for(void* user, uint64_t number, int64_t deadline_ns, const char* phase,
                                conclave_comm_failure* failure) {
  member* const me = user;
  thread_group* const group = me->group;
  const struct timespec deadline = after(deadline_ns);
  conclave_status status = CONCLAVE_OK;
  int is_late = 0;
  request* of;
  (void)phase;  // the library says it in the error
  pthread_mutex_lock(&group->lock);
  of = find_number(me, number);
  if (of == NULL)
    group_fail(group, CONCLAVE_ERROR_STATE, me->rank, "no such operation is under way");
  while (group->failure == CONCLAVE_OK && !of->is_complete) {
    const int32_t missing = group_meet(group, of);
    if (missing < 0) continue;
    if (group->members[missing].has_left) {
      group_fail(group, CONCLAVE_ERROR_COMM_PEER_LOST, missing, "a rank has left");
    } else if (is_late) {
      group_fail(group, CONCLAVE_ERROR_COMM_TIMEOUT, missing, "a rank did not come in time");
    } else {
      is_late = pthread_cond_timedwait(&group->change, &group->lock, &deadline) != 0;
    }
  }
  // A complete operation stays so, whatever has happened since.
  if (of == NULL || !of->is_complete) status = group_tell(group, failure);
  if (of != NULL) of->is_used = 0;
  pthread_mutex_unlock(&group->lock);
  return status;
}

static conclave_status test(void* user, uint64_t number, int32_t* complete, const char* phase,
                            conclave_comm_failure* failure) {
  member* const me = user;
  thread_group* const group = me->group;
  conclave_status status = CONCLAVE_OK;
  request* of;
  (void)phase;
  pthread_mutex_lock(&group->lock);
  of = find_number(me, number);
  if (of != NULL && of->is_complete) {
    *complete = 1;
  } else {
    status = group_tell(group, failure);
  }
  pthread_mutex_unlock(&group->lock);
  return status;
}

static conclave_status check(void* user, const char* phase, conclave_comm_failure* failure) {
  member* const me = user;
  conclave_status status;
  (void)phase;
  pthread_mutex_lock(&me->group->lock);
  status = group_tell(me->group, failure);
  pthread_mutex_unlock(&me->group->lock);
  return status;
}

static void abort_all(void* user, const char* reason) {
  member* const me = user;
  pthread_mutex_lock(&me->group->lock);
  group_fail(me->group, CONCLAVE_ERROR_COMM_ABORTED, me->rank, reason);
  pthread_mutex_unlock(&me->group->lock);
}

// Buffers of what was begun and never waited for are no longer this rank's to lend.
static void release(void* user) {
  member* const me = user;
  int i;
  pthread_mutex_lock(&me->group->lock);
  me->has_left = 1;
  for (i = 0; i < MOST_UNDER_WAY; ++i) me->requests[i].is_used = 0;
  pthread_cond_broadcast(&me->group->change);
  pthread_mutex_unlock(&me->group->lock);
}

static void forget(thread_group* group) {
  int32_t rank;
  for (rank = 0; group->members != NULL && rank < group->size; ++rank) {
    free(group->members[rank].sent);
    free(group->members[rank].received);
  }
  free(group->members);
  free(group->meeting);
  free(group);
}

static int make_members(thread_group* group, int32_t size) {
  int32_t rank;
  group->size = size;
  group->members = calloc((size_t)size, sizeof *group->members);
  group->meeting = calloc((size_t)size, sizeof *group->meeting);
  if (group->members == NULL || group->meeting == NULL) return 0;
  for (rank = 0; rank < size; ++rank) {
    member* const made = &group->members[rank];
    made->group = group;
    made->rank = rank;
    made->sent = calloc((size_t)size, sizeof *made->sent);
    made->received = calloc((size_t)size, sizeof *made->received);
    if (made->sent == NULL || made->received == NULL) return 0;
  }
  return 1;
}

struct thread_group* thread_group_create(int32_t size) {
  thread_group* const group = calloc(1, sizeof *group);
  pthread_condattr_t monotonic;
  if (group == NULL) return NULL;
  if (!make_members(group, size)) {
    forget(group);
    return NULL;
  }
  pthread_mutex_init(&group->lock, NULL);
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&group->change, &monotonic);
  pthread_condattr_destroy(&monotonic);
  return group;
}

void thread_group_destroy(thread_group* group) {
  pthread_cond_destroy(&group->change);
  pthread_mutex_destroy(&group->lock);
  forget(group);
}

conclave_own_communicator thread_group_rank(thread_group* group, int32_t rank, int64_t timeout_ms) {
  conclave_own_communicator own = {0};
  own.struct_size = sizeof own;
  own.name = "threads of the example";
  own.user = &group->members[rank];
  own.rank = rank;
  own.size = group->size;
  own.timeout_ms = timeout_ms;
  own.flags = CONCLAVE_OWN_COMMUNICATOR_OVERLAP;  // the last to start moves everybody's bytes
  own.start = start;
  own.wait = wait_for;
  own.test = test;
  own.abort = abort_all;
  own.release = release;
  own.check = check;
  return own;
}

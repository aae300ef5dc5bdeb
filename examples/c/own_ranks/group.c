#include "group.h"

#include "reduce.h"

#include <stdio.h>
#include <string.h>

conclave_status group_fail(thread_group* group, conclave_status status, int32_t culprit,
                           const char* reason) {
  if (group->failure != CONCLAVE_OK) return group->failure;
  group->failure = status;
  group->culprit = culprit;
  snprintf(group->reason, sizeof group->reason, "%s", reason);
  pthread_cond_broadcast(&group->change);
  return status;
}

conclave_status group_tell(const thread_group* group, conclave_comm_failure* failure) {
  if (group->failure == CONCLAVE_OK) return CONCLAVE_OK;
  failure->peer = group->culprit;
  failure->reason = group->reason;  // is never written again, so that it needs no lock
  return group->failure;
}

static request* find(member* on, int32_t from, int32_t to, conclave_comm_kind kind,
                     uint64_t order) {
  int i;
  for (i = 0; i < MOST_UNDER_WAY; ++i) {
    request* const at = &on->requests[i];
    if (at->is_used && at->from == from && at->to == to && at->order == order &&
        (to == EVERYBODY || at->operation.kind == kind)) {
      return at;
    }
  }
  return NULL;
}

static void copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) memcpy(to, from, bytes);
}

// Sizes and types that two ranks say of one operation have to be the same.
static int agree(const conclave_comm_operation* one, const conclave_comm_operation* other,
                 int32_t rank_of_one, int32_t rank_of_other) {
  if (one->kind != other->kind) return 0;
  if (one->kind == CONCLAVE_COMM_KIND_ALL_TO_ALL_V) {
    return one->send_counts[rank_of_other] == other->recv_counts[rank_of_one] &&
           one->recv_counts[rank_of_other] == other->send_counts[rank_of_one];
  }
  return one->send_bytes == other->send_bytes && one->recv_bytes == other->recv_bytes &&
         one->dtype == other->dtype && one->reduce == other->reduce;
}

static size_t bytes_of_part(const conclave_comm_operation* to, const conclave_comm_operation* from,
                            int32_t rank) {
  if (to->kind == CONCLAVE_COMM_KIND_ALL_TO_ALL_V) return (size_t)to->recv_counts[rank];
  return to->kind == CONCLAVE_COMM_KIND_ALL_GATHER ? from->send_bytes : to->recv_bytes;
}

// This rank's part of the operation on all ranks: it takes what they give, in rank order.
static void take_part(const thread_group* group, int32_t me) {
  const conclave_comm_operation* const to = &group->meeting[me]->operation;
  char* const received = to->recv;
  int32_t rank;
  for (rank = 0; rank < group->size && to->kind != CONCLAVE_COMM_KIND_BARRIER; ++rank) {
    const conclave_comm_operation* const from = &group->meeting[rank]->operation;
    const char* const given = from->send;
    const size_t bytes = bytes_of_part(to, from, rank);
    if (bytes == 0) continue;  // buffers without bytes may be null, and then have no places
    switch (to->kind) {
      case CONCLAVE_COMM_KIND_ALL_TO_ALL_V:
        copy(received + to->recv_offsets[rank], given + from->send_offsets[me], bytes);
        break;
      case CONCLAVE_COMM_KIND_ALL_GATHER:
        copy(received + (size_t)rank * bytes, given, bytes);
        break;
      case CONCLAVE_COMM_KIND_ALL_REDUCE:
        reduce_rows(received, given, bytes, to->dtype, to->reduce, rank == 0);
        break;
      default:  // REDUCE_SCATTER
        reduce_rows(received, given + (size_t)me * bytes, bytes, to->dtype, to->reduce, rank == 0);
    }
  }
}

static int32_t meet_everybody(thread_group* group, const request* of) {
  int32_t rank;
  for (rank = 0; rank < group->size; ++rank) {
    group->meeting[rank] = find(&group->members[rank], EVERYBODY, EVERYBODY, 0, of->order);
    if (group->meeting[rank] == NULL) return rank;
  }
  int32_t other;
  for (rank = 0; rank < group->size; ++rank) {
    for (other = 0; other < rank; ++other) {
      if (agree(&group->meeting[rank]->operation, &group->meeting[other]->operation, rank, other)) {
        continue;
      }
      group_fail(group, CONCLAVE_ERROR_COMM_MISMATCH, rank, "ranks disagree on an operation");
      return -1;
    }
  }
  for (rank = 0; rank < group->size; ++rank) take_part(group, rank);
  for (rank = 0; rank < group->size; ++rank) group->meeting[rank]->is_complete = 1;
  return -1;
}

static int32_t meet_pair(thread_group* group, const request* of) {
  request* const send =
      find(&group->members[of->from], of->from, of->to, CONCLAVE_COMM_KIND_SEND, of->order);
  request* const receive =
      find(&group->members[of->to], of->from, of->to, CONCLAVE_COMM_KIND_RECV, of->order);
  if (send == NULL) return of->from;
  if (receive == NULL) return of->to;
  if (send->operation.send_bytes != receive->operation.recv_bytes) {
    group_fail(group, CONCLAVE_ERROR_COMM_MISMATCH, of->to, "a message has another size");
    return -1;
  }
  copy(receive->operation.recv, send->operation.send, send->operation.send_bytes);
  send->is_complete = receive->is_complete = 1;
  return -1;
}

int32_t group_meet(thread_group* group, const request* of) {
  const int32_t missing = of->to == EVERYBODY ? meet_everybody(group, of) : meet_pair(group, of);
  if (missing < 0) pthread_cond_broadcast(&group->change);
  return missing;
}

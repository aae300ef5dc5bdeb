// A transport between ranks that are threads, written as an application would write its own:
// nothing of it is the library's but the table of functions that conclave/c/own_communicator.h asks
// for.
#pragma once

#include <conclave/c.h>

// Ranks that meet. Outlives all communicators of its ranks.
struct thread_group;

// NULL where there is no memory.
struct thread_group* thread_group_create(int32_t size);
void thread_group_destroy(struct thread_group* group);

// The table of one rank, of which conclave_communicator_from_own makes a communicator. Each rank is
// made once; rank and size are checked there.
conclave_own_communicator thread_group_rank(struct thread_group* group, int32_t rank,
                                            int64_t timeout_ms);

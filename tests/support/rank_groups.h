// The groups of ranks over which a program tests what every communicator must do.
#pragma once

#include "conclave/comm.h"

#include <cstdint>
#include <functional>

namespace conclave::testing {

// Calls body(rank, communicator) on each rank of each group, with a communicator that is new.
// Failures of any rank count. thread_rank_groups.cc: every transport that can have a group in one
// process, with 1 to 8 ranks. mpi_rank_groups.cc: the ranks that the launcher has started.
void on_every_group(const std::function<void(int32_t, Communicator&)>& body);

}  // namespace conclave::testing

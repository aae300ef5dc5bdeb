// Makes a Communicator of an application's MPI_Comm. For builds with MPI: transports() says so.
#pragma once

#include "conclave/comm.h"
#include "conclave/version.h"

#include <chrono>
#include <memory>
#include <mpi.h>

namespace conclave::inline v0 {

// Collective over `communicator`, an intracommunicator with 1 rank or more, which it duplicates:
// its own messages and error handler stay as they are, and it may be freed at once. MPI must be
// initialised, and be finalised after the result is destroyed; below MPI_THREAD_SERIALIZED the
// result belongs to the main thread. Throws Error: kNullPointer, kState after MPI_Finalize;
// CommError if a rank does not come within `timeout`, which is also that of each wait.
CONCLAVE_API std::unique_ptr<Communicator> make_mpi_communicator(
    MPI_Comm communicator, std::chrono::nanoseconds timeout = std::chrono::seconds(30));

}  // namespace conclave::inline v0

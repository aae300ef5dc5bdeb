// Makes a Communicator of an application's ncclComm_t. For builds with CUDA: transports() says so.
// Needs no NCCL header: ncclComm_t is a pointer to the type that is declared here.
#pragma once

#include "conclave/comm.h"
#include "conclave/version.h"

#include <chrono>
#include <memory>

struct ncclComm;

namespace conclave::inline v0 {

// Collective over `communicator`, which ncclCommSplit copies: the application's own stays as it is,
// may be used beside the result, and may be destroyed at once. It comes from the library that the
// process has loaded as libnccl.so.2. `bootstrap` has the same ranks; it is needed for this call
// only. Throws Error: kNullPointer, kInvalidArgument, kUnsupported, kDevice; CommError if a rank
// does not come within `timeout`, which is also that of each wait.
CONCLAVE_API std::unique_ptr<Communicator> make_nccl_communicator(
    ncclComm* communicator, Communicator& bootstrap,
    std::chrono::nanoseconds timeout = std::chrono::seconds(30));

}  // namespace conclave::inline v0

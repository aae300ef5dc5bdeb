// Ranks that have a communicator of host memory become ranks of NCCL: when they connect, and again
// when some are left of them.
#pragma once

#include "comm/nccl/nccl_group.h"
#include "comm/nccl/nccl_library.h"

#include "conclave/comm.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

namespace conclave::inline v0::comm {

class NcclCommunicator;

struct NcclPlace {
  int32_t ordinal = 0;                  // names the device, which is current
  std::chrono::nanoseconds timeout{};   // for waits of the communicator
  std::chrono::nanoseconds deadline{};  // for the ranks to be connected
};

// Makes NCCL's communicator of the ranks, which waits for each of them. None: a new one is made by
// an id that rank 0 draws.
using MakeGroup = std::function<NcclResult(const NcclLibrary& nccl, ncclComm** made)>;

// Collective over `host`, communicator of TCP, which the result takes; where a CommError is thrown
// the caller still has it. Throws CommError naming the rank that is lost or late;
// Error(kUnsupported) and Error(kDevice) for what this rank has met, and CommError(kCommAborted)
// then on the others.
std::unique_ptr<NcclCommunicator> join_ranks(std::unique_ptr<Communicator>& host,
                                             const NcclPlace& place, const MakeGroup& make = {});

// Throws Error(kUnsupported) with the reason.
NcclLibrary usable_nccl();

}  // namespace conclave::inline v0::comm

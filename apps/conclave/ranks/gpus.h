// One GPU for each rank.
#pragma once

#include "ranks/connect_ranks.h"

#include "conclave/comm.h"

#include <cstdint>
#include <string>

namespace conclave::tool {

// Throws Error(kUnsupported), which says what to do next, where this machine has not so many GPUs
// that this build can use, or `transport`, which carries their memory, does not run here.
void check_gpus(const ProcessTransport& transport, int32_t ranks);

// Collective: a GPU of this rank's own, "cuda:1" for the kind "cuda", among those that it and other
// ranks of its machine see (CUDA_VISIBLE_DEVICES). Every rank throws Error(kUnsupported) where one
// has none.
std::string device_of_rank(Communicator& all, const std::string& kind);

}  // namespace conclave::tool

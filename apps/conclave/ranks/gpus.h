// One GPU for each rank.
#pragma once

#include "conclave/comm.h"

#include <cstdint>
#include <string>

namespace conclave::tool {

// Throws Error(kUnsupported), which says what to do next, where this machine has not so many GPUs
// that this build can use, or `transport`, which carries their memory, does not run here.
void check_gpus(const std::string& transport, int32_t ranks);

// Collective: a GPU of this rank's own, "cuda:1", among those that it and other ranks of its
// machine see (CUDA_VISIBLE_DEVICES). Every rank throws Error(kUnsupported) where one has none.
std::string gpu_of_rank(Communicator& all);

}  // namespace conclave::tool

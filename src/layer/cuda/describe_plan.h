// A plan on CUDA in words and numbers.
#pragma once

#include "layer/cuda/plan.h"

#include "conclave/comm.h"

namespace conclave::inline v0 {

// Fills the summary of a plan whose parts are chosen, but for its device and rows.
void summarise(CudaPlan& plan);
// Lists what travels between ranks, for a plan whose rows gather.
void list_exchange(CudaPlan& plan);
// Adds to `table` whether operations of these ranks take one launch each, or why not.
void list_launches(CudaPlan& plan, const char* table, const Communicator& ranks);

}  // namespace conclave::inline v0

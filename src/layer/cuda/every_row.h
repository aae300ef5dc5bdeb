// The ids of experts that every row uses: shared experts launched apart, and the residual MLP.
#pragma once

#include "layer/cuda/device_memory.h"
#include "layer/cuda/plan.h"

#include <cstdint>

namespace conclave::inline v0 {

struct EveryRowIds {
  DeviceMemory shared;    // [tokens, S] int32: 0 to S - 1; empty without them
  DeviceMemory residual;  // [tokens, 1] int32: 0
  int64_t tokens = 0;     // the largest call that these ids serve
};

// Makes ids for the plan's tokens, but at least MoeLayer::kReplannedTokens, so that replanned
// layers share them.
EveryRowIds make_every_row(const Context& context, const CudaPlan& plan, Stream stream);
// True if the ids suffice for the plan's calls.
bool serves(const EveryRowIds& ids, const CudaPlan& plan);

}  // namespace conclave::inline v0

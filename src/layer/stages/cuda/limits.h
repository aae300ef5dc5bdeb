// Limits of a call's choices on CUDA: fewer of them for a token, banned experts, a budget of
// experts for all tokens together. Nothing here looks into device memory or waits for it.
#pragma once

#include "layer/stages/cuda/call_limits.h"
#include "layer/stages/cuda/route.h"
#include "routing/cuda/call_bans.h"
#include "routing/cuda/device_router.h"

#include "conclave/layer.h"

#include <cstdint>

namespace conclave::inline v0 {

// Finds the limits of a call, which are checked. Asks the driver where banned_experts lie, if
// there are any.
CudaCallLimits limits_of_call(const CudaPlan& plan, const ForwardArgs& args);

// Before the first chunk: bans for all tokens from host memory, and sums for a budget.
void begin_limits(const CudaChunk& chunk, const ForwardArgs& call);
// After all chunks were counted: bans what is beyond the budget.
void end_budget(const CudaChunk& chunk, const ForwardArgs& call);

// The limits of a chunk, whose rows `args` are.
CudaLimits limits_of_chunk(const CudaChunk& chunk, const ForwardArgs& args);

// Choices that obey the limits, dense [T, k]: zero experts keep their ids, empty slots have -1 and
// weight 0.
struct CudaChoices {
  const int32_t* ids = nullptr;
  const float* weights = nullptr;
};
// Whether LayerStatus hears of what a pass skips: a budget's first pass is run once more.
enum class CudaCounts : uint8_t { kAdd, kNone };

// Runs the layer's router within the limits. `call`: the router's arguments as without limits, with
// the caller's ids, if any, as choices to be weighed.
CudaChoices choose_within_limits(const CudaChunk& chunk, const CudaLimits& limits,
                                 const routing::DeviceRouterArgs& call, CudaCounts counts);
// Cuts ids and weights that the caller gives.
CudaChoices keep_within_limits(const CudaChunk& chunk, const CudaGiven& given);
// Adds the choices to the sums of the call's budget.
void count_choices(const CudaChunk& chunk, const CudaGiven& given, const CudaChoices& choices);

}  // namespace conclave::inline v0

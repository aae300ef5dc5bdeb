// First step of a forward on CUDA: every check that needs no look into device memory.
#pragma once

#include "routing/router.h"

#include "conclave/layer.h"

#include <cstdint>

namespace conclave::inline v0 {

// Throws as check_tensors; Error(kNullPointer) without a stream; Error(kUnsupported) for timings;
// Error(kDevice) naming an argument that is not in memory of device `ordinal`; as
// check_choice_limits for limits. Bans for all tokens may lie in host memory.
void check_cuda_arguments(const ForwardArgs& args, const MoeSpec& spec,
                          const routing::RouterTraits& router, int32_t ordinal);

}  // namespace conclave::inline v0

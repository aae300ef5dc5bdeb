// TokenRouter on CUDA.
#pragma once

#include "layer/engine.h"

#include "conclave/error.h"
#include "conclave/spec.h"

#include <cstdint>

namespace conclave::inline v0 {

Support cuda_routes(const MoeSpec& spec);
// Makes the router once, for a spec that cuda_routes() accepts. A call checks arguments except the
// contents of their memory, and enqueues one or two launches on its stream. A token id that is no
// row of the router's table chooses nothing: ids -1.
RouteFunction make_cuda_route(int32_t ordinal, const MoeSpec& spec);

}  // namespace conclave::inline v0

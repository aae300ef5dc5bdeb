// TokenRouter on CUDA.
#pragma once

#include "conclave/error.h"
#include "conclave/spec.h"
#include "conclave/token_router.h"

#include <cstdint>

namespace conclave::inline v0 {

Support cuda_routes(const MoeSpec& spec);
// Checks arguments except the contents of their memory. Enqueues one or two launches on the call's
// stream. A token id that is no row of the hash table chooses nothing: ids -1.
void cuda_route(int32_t ordinal, const MoeSpec& spec, const RouteArgs& args);

}  // namespace conclave::inline v0

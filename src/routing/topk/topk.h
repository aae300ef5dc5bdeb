// Router "topk": score, choose the k best, renormalise, scale. See RouterSpec and docs/routing.md.
#pragma once

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"

#include <memory>

namespace conclave::inline v0::routing {

// Needs 1 <= k <= the number of experts that can be chosen: E + Z, or those of the kept groups.
Support topk_supports(const MoeSpec& spec);
std::unique_ptr<Router> make_topk_router(const MoeSpec& spec);

}  // namespace conclave::inline v0::routing

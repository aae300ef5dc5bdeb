// Router "topk": score, choose the k best, renormalise, scale. See RouterSpec and docs/routing.md.
#pragma once

#include "routing/router.h"

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"

#include <memory>
#include <random>

namespace conclave::inline v0::routing {

// Needs 1 <= k <= the number of experts that can be chosen: E + Z, or those of the kept groups.
Support topk_supports(const MoeSpec& spec);
std::unique_ptr<Router> make_topk_router(const MoeSpec& spec);
void check_topk(const MoeSpec& spec);
ReferenceChoice topk_oracle(const MoeSpec& spec, const ReferenceToken& token);
void draw_topk(std::mt19937& generator, MoeSpec& spec);
extern const DeviceRouterRow kTopkOnDevice;

}  // namespace conclave::inline v0::routing

// Router "simulated": ids by seed and token number, for load tests. See SimulatedRouting.
#pragma once

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"

#include <memory>

namespace conclave::inline v0::routing {

// Needs 1 <= k <= E, and for kReplay whole rows of ids.
Support simulated_supports(const MoeSpec& spec);
std::unique_ptr<Router> make_simulated_router(const MoeSpec& spec);

}  // namespace conclave::inline v0::routing

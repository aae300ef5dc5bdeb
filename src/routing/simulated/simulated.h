// Router "simulated": ids by seed and token number, for load tests. See SimulatedRouting.
#pragma once

#include "routing/router.h"

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"

#include <memory>
#include <random>

namespace conclave::inline v0::routing {

// Needs 1 <= k <= E, and for kReplay whole rows of ids.
Support simulated_supports(const MoeSpec& spec);
std::unique_ptr<Router> make_simulated_router(const MoeSpec& spec);
void check_simulated(const MoeSpec& spec);
void refuse_simulated_fields(const RouterSpec& other);
ReferenceChoice simulated_oracle(const MoeSpec& spec, const ReferenceToken& token);
void draw_simulated(std::mt19937& generator, MoeSpec& spec);
extern const DeviceRouterRow kSimulatedOnDevice;

}  // namespace conclave::inline v0::routing

// Router "sink_softmax": shared experts compete with the chosen ones for weight (Inkling).
#pragma once

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"

#include <memory>

namespace conclave::inline v0::routing {

// Needs SharedMode::kRouterWeight with S >= 1, and 1 <= k <= E.
Support sink_softmax_supports(const MoeSpec& spec);
std::unique_ptr<Router> make_sink_softmax_router(const MoeSpec& spec);

}  // namespace conclave::inline v0::routing

// Router "sink_softmax": shared experts compete with the chosen ones for weight (Inkling).
#pragma once

#include "routing/router.h"

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"

#include <memory>
#include <random>

namespace conclave::inline v0::routing {

// Needs SharedMode::kRouterWeight with S >= 1, and 1 <= k <= E.
Support sink_softmax_supports(const MoeSpec& spec);
std::unique_ptr<Router> make_sink_softmax_router(const MoeSpec& spec);
void check_sink_softmax(const MoeSpec& spec);
ReferenceChoice sink_softmax_oracle(const MoeSpec& spec, const ReferenceToken& token);
void draw_sink_softmax(std::mt19937& generator, MoeSpec& spec);
extern const DeviceRouterRow kSinkSoftmaxOnDevice;

}  // namespace conclave::inline v0::routing

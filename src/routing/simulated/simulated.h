// Router "simulated": ids by seed and token number, for load tests. See SimulatedRouting.
#pragma once

#include "routing/router.h"

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"

#include <array>
#include <memory>
#include <random>

namespace conclave::inline v0::routing {

RouterTensorSize replay_size(const MoeSpec& spec, size_t elements);
// Those of kReplay are.
bool simulated_recalls(const MoeSpec& spec);
void keep_simulated_choices(MoeSpec& spec, int64_t top_k);
// Needs 1 <= k <= E, and for kReplay whole rows of ids.
Support simulated_supports(const MoeSpec& spec);
std::unique_ptr<Router> make_simulated_router(const MoeSpec& spec);
void check_simulated(const MoeSpec& spec);
void refuse_simulated_fields(const RouterSpec& other);
ReferenceChoice simulated_oracle(const MoeSpec& spec, const ReferenceToken& token);
void draw_simulated(std::mt19937& generator, MoeSpec& spec);
extern const DeviceRouterRow kSimulatedOnDevice;

// Rows of recorded choices, which the spec holds and devices need a copy of.
inline constexpr std::array kSimulatedTensors = {
    RouterTensor{.name = "replay_ids",
                 .element = RouterElement::kIndex,
                 .size =
                     [](const MoeSpec& spec) {
                       return replay_size(spec, spec.router.simulated.replay_ids.size());
                     },
                 .in_spec =
                     [](const MoeSpec& spec) {
                       return std::as_bytes(std::span(spec.router.simulated.replay_ids));
                     }},
    RouterTensor{.name = "replay_weights",
                 .size =
                     [](const MoeSpec& spec) {
                       return replay_size(spec, spec.router.simulated.replay_weights.size());
                     },
                 .in_spec =
                     [](const MoeSpec& spec) {
                       return std::as_bytes(std::span(spec.router.simulated.replay_weights));
                     }},
};

}  // namespace conclave::inline v0::routing

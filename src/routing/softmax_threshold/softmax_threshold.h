// Router "softmax_threshold": the k best, without those whose share of the softmax is below a ratio
// of the best one's. Tokens that are sure of few experts use few.
#pragma once

#include "routing/router.h"

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"

#include <array>
#include <memory>
#include <random>

namespace conclave::inline v0::routing {

inline constexpr std::array kSoftmaxThresholdOptions = {
    RouterOption{.name = "ratio", .value = 0.1, .low = 1e-9, .high = 1},
};
// Choices whose logit is at least the best of the row plus this are kept: the log of the ratio.
double softmax_threshold(const MoeSpec& spec);

// Needs 1 <= k <= E.
Support softmax_threshold_supports(const MoeSpec& spec);
std::unique_ptr<Router> make_softmax_threshold_router(const MoeSpec& spec);
void check_softmax_threshold(const MoeSpec& spec);
ReferenceChoice softmax_threshold_oracle(const MoeSpec& spec, const ReferenceToken& token);
void draw_softmax_threshold(std::mt19937& generator, MoeSpec& spec);
extern const DeviceRouterRow kSoftmaxThresholdOnDevice;

}  // namespace conclave::inline v0::routing

// Router "top_any": of the k best experts those whose logit is above a threshold of their own, with
// equal weights; the best alone if none is. The choice of DynMoE (arXiv 2405.14297).
#pragma once

#include "routing/router.h"

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"
#include "conclave/weights.h"

#include <array>
#include <memory>
#include <random>
#include <string>

namespace conclave::inline v0::routing {

// Needs 1 <= k <= E.
Support top_any_supports(const MoeSpec& spec);
std::unique_ptr<Router> make_top_any_router(const MoeSpec& spec);
void check_top_any(const MoeSpec& spec);
ReferenceChoice top_any_oracle(const MoeSpec& spec, const ReferenceToken& token);
void draw_top_any(std::mt19937& generator, MoeSpec& spec);
extern const DeviceRouterRow kTopAnyOnDevice;

// Refuses NaN, above which no logit lies.
void check_thresholds(const MoeSpec& spec, const ConstTensorView& rows, int64_t first_row,
                      const std::string& where);

inline constexpr std::array kTopAnyTensors = {RouterTensor{
    .name = "expert_threshold",
    .id = weights::router_tensor(1),
    .size =
        [](const MoeSpec& spec) { return RouterTensorSize{.rows = 1, .cols = spec.num_experts}; },
    .is_vector = true,
    .check = check_thresholds,
    .pattern = "{base}gate.expert_threshold",
}};

}  // namespace conclave::inline v0::routing

#include "core/shared_facts.h"
#include "routing/check_spec.h"
#include "routing/sink_softmax/sink_softmax.h"

#include "conclave/error.h"

#include <cstdint>
#include <string>

namespace conclave::inline v0::routing {

void check_sink_softmax(const MoeSpec& spec) {
  const RouterSpec& router = spec.router;
  refuse_weighing(router);
  const UnusedFields unused(router);
  unused.must_be("num_groups", router.num_groups, {int64_t{1}});
  unused.must_be("score", router.score, {RouterScore::kSoftmax, RouterScore::kSigmoid});
  unused.must_be("renormalize", router.renormalize,
                 {Renormalize::kSum, Renormalize::kNone, Renormalize::kSoftmax});
  if (shared_facts(spec).by_router()) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "router " + router.name + " weighs shared experts",
               .expected = "SharedMode::kRouterWeight",
               .found = "mode " + std::to_string(static_cast<int>(spec.shared.mode))});
}

void draw_sink_softmax(std::mt19937& generator, MoeSpec& spec) {
  const auto pick = [&](uint32_t count) { return static_cast<int64_t>(generator() % count); };
  spec.num_experts = 1 + pick(64);
  spec.top_k = 1 + pick(static_cast<uint32_t>(spec.num_experts));
  spec.shared.mode = SharedMode::kRouterWeight;
  spec.shared.intermediate_size = spec.intermediate_size;
  spec.shared.count = 1 + pick(4);
  spec.router.has_selection_bias = pick(2) == 0;
  spec.router.has_global_scale = pick(2) == 0;
  spec.router.scale = pick(2) == 0 ? 1.0 : 2.5;
}

}  // namespace conclave::inline v0::routing

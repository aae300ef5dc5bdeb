#include "routing/check_spec.h"
#include "routing/topk/topk.h"

#include <cstdint>
#include <string>
#include <utility>

namespace conclave::inline v0::routing {
namespace {

// Any value of every step.
RouterSpec draw_router(std::mt19937& generator) {
  const auto pick = [&](uint32_t count) { return static_cast<int64_t>(generator() % count); };
  RouterSpec router{.score = static_cast<RouterScore>(pick(4)),
                    .order = static_cast<RouterOrder>(pick(2)),
                    .soft_cap = pick(4) == 0 ? 5.0 : 0.0,
                    .has_selection_bias = pick(2) == 0,
                    .num_groups = pick(2) == 0 ? 1 : 1 + pick(8),
                    .group_score = static_cast<GroupScore>(pick(2)),
                    .group_mask = static_cast<GroupMask>(pick(2)),
                    .renormalize = static_cast<Renormalize>(pick(4)),
                    .epsilon_mode = static_cast<EpsilonMode>(pick(2)),
                    .scale = pick(2) == 0 ? 1.0 : 2.5,
                    .has_expert_scale = pick(3) == 0,
                    .has_global_scale = pick(3) == 0,
                    .score_dtype = pick(4) == 0 ? DType::kBF16 : DType::kF32};
  router.topk_groups = 1 + pick(static_cast<uint32_t>(router.num_groups));
  if (router.renormalize == Renormalize::kPNorm)
    router.renormalize_p = static_cast<double>(1 + pick(3));
  const bool divides =
      router.renormalize == Renormalize::kSum || router.renormalize == Renormalize::kPNorm;
  if (divides && pick(2) == 0) router.epsilon = pick(2) == 0 ? 1e-20 : 1e-2;
  return router;
}

}  // namespace

void check_topk(const MoeSpec&) {}

void draw_topk(std::mt19937& generator, MoeSpec& spec) {
  const auto pick = [&](uint32_t count) { return static_cast<int64_t>(generator() % count); };
  const int64_t group_size = 2 + pick(6);
  std::string name = std::move(spec.router.name);
  spec.router = draw_router(generator);
  spec.router.name = std::move(name);
  const int64_t usable = spec.router.topk_groups * group_size;
  spec.num_experts = spec.router.num_groups * group_size;
  spec.top_k = 1 + pick(static_cast<uint32_t>(usable));
  if (spec.router.num_groups == 1 && pick(3) == 0) spec.num_zero_experts = 1 + pick(4);
}

}  // namespace conclave::inline v0::routing

#include "layer/cuda/route_and_group.h"

#include "core/checked.h"
#include "core/token_ladder.h"
#include "dispatch/cuda/group_shape.h"
#include "layer/cuda/route_group_shape.h"

#include <algorithm>
#include <array>
#include <string>

namespace conclave::inline v0 {
namespace {

// Measured on an H200: more tokens per block than this, and the barrier of a further block pays.
constexpr int64_t kBlockTokens = 8;
// One warp per token, so that a block's tokens have one bit each in a word. More tokens take longer
// than a launch that spreads them over the GPU.
constexpr int64_t kMaxBlockTokens = 16;
constexpr dispatch::GroupShape kNoShape{.blocks = 0};

Support at_most(const char* what, int64_t found, int64_t limit) {
  if (found <= limit) return Support::yes();
  return Support::no(std::string(what) + " " + std::to_string(found) + " exceeds " +
                     std::to_string(limit));
}

Support with_group_supports(const RouteGroupProblem& problem) {
  if (problem.route == nullptr) return Support::no("other launches choose the experts");
  if (problem.has_replicas) return Support::no("replicas are chosen before rows are grouped");
  constexpr int64_t kMaxColumns = int64_t{kMaxRouteGroupColumnsALane} * 32;
  const int64_t columns = problem.route->made.num_columns;
  if (Support fits = at_most("experts to choose from:", columns, kMaxColumns); !fits) return fits;
  const int64_t slots = problem.route->made.top_k;
  if (Support fits = at_most("top_k", slots, routing::kLaneSlots); !fits) return fits;
  return at_most("local experts:", problem.num_local_experts, kMaxRouteGroupThreads);
}

dispatch::GroupShape with_group_shape(const RouteGroupProblem& problem, int64_t num_tokens) {
  const dispatch::GroupShape shape =
      route_and_group_shape(*problem.route, num_tokens, problem.num_local_experts);
  const bool fits = shape.cluster <= problem.cluster_blocks &&
                    dispatch::dynamic_shared_fits(shape.shared_bytes, problem.shared_bytes);
  return fits ? shape : kNoShape;
}

Support every(const RouteGroupProblem& /*problem*/) { return Support::yes(); }
dispatch::GroupShape none(const RouteGroupProblem& /*problem*/, int64_t /*num_tokens*/) {
  return kNoShape;
}

constexpr std::array kRows = {
    RouteGroupRow{.name = "cuda.route_with_group",
                  .supports = with_group_supports,
                  .shape = with_group_shape,
                  .reason = "one launch, one warp per token"},
    RouteGroupRow{.name = "cuda.route_then_group",
                  .supports = every,
                  .shape = none,
                  .reason = "routing is spread over the device"},
};

RouteGroupRung rung_at(const RouteGroupProblem& problem, bool with_group, int64_t num_tokens) {
  const dispatch::GroupShape shape =
      with_group ? kRows.front().shape(problem, num_tokens) : kNoShape;
  return {.last_tokens = num_tokens,
          .row = shape.blocks > 0 ? &kRows.front() : &kRows.back(),
          .shape = shape};
}

}  // namespace

Catalog<RouteGroupRow> route_group_catalog() { return Catalog<RouteGroupRow>(kRows); }

std::vector<RouteGroupRung> route_group_ladder(const RouteGroupProblem& problem) {
  std::vector<RouteGroupRung> ladder;
  const auto add = [&](const RouteGroupRung& rung) {
    add_rung(ladder, rung, [](const RouteGroupRung& a, const RouteGroupRung& b) {
      return a.row == b.row && a.shape == b.shape;
    });
  };
  const bool with_group = static_cast<bool>(kRows.front().supports(problem));
  constexpr int64_t kMostTokens = kMaxRouteGroupBlocks * kMaxBlockTokens;
  const int64_t shaped = with_group ? std::min(problem.max_tokens, kMostTokens) : 0;
  for (int64_t tokens = 1; tokens <= shaped; ++tokens) add(rung_at(problem, true, tokens));
  if (shaped < problem.max_tokens) add(rung_at(problem, false, problem.max_tokens));
  return ladder;
}

size_t route_and_group_shared_bytes(const routing::DeviceRoutePlan& plan,
                                    const dispatch::GroupShape& shape, int64_t num_local_experts) {
  const auto warps = static_cast<size_t>(shape.threads / 32);
  const auto scratch = static_cast<size_t>(routing::route_scratch_doubles(plan.made));
  return token_shared_bytes(num_local_experts, shape.blocks) + warps * scratch * sizeof(double);
}

dispatch::GroupShape route_and_group_shape(const routing::DeviceRoutePlan& plan, int64_t num_tokens,
                                           int64_t num_local_experts) {
  if (routing::columns_a_lane(plan.made) > kMaxRouteGroupColumnsALane) return kNoShape;
  dispatch::GroupShape shape;
  while (shape.blocks < kMaxRouteGroupBlocks && num_tokens > shape.blocks * kBlockTokens) {
    shape.blocks *= 2;
  }
  const int64_t tokens = ceil_div(num_tokens, shape.blocks);
  if (tokens > kMaxBlockTokens || num_local_experts > kMaxRouteGroupThreads) return kNoShape;
  shape.cluster = shape.blocks;
  shape.threads = static_cast<int32_t>(std::max(tokens, ceil_div(num_local_experts, 32)) * 32);
  shape.shared_bytes = route_and_group_shared_bytes(plan, shape, num_local_experts);
  return shape.shared_bytes <= kMaxRouteGroupSharedBytes ? shape : kNoShape;
}

}  // namespace conclave::inline v0

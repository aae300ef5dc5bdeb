#include "core/checked.h"
#include "core/router_rule.h"
#include "routing/cuda/device_rules.h"
#include "routing/cuda/route_rule.h"
#include "routing/hash/hash.h"
#include "routing/simulated/simulated.h"
#include "routing/sink_softmax/sink_softmax.h"
#include "routing/sparse_mixer/sparse_mixer.h"

#include <algorithm>
#include <bit>
#include <string>

namespace conclave::inline v0::routing {
namespace {

constexpr uint32_t kInverseBits = 20;
// Candidates beyond the k-th: doubt remains only if three neighbours are closer than float32
// resolves.
constexpr int32_t kSpareCandidates = 2;

// A softmax over all columns, divided by the sum of the chosen, is a softmax over the chosen, as in
// topk.cc.
bool is_softmax_of_chosen(const RouterSpec& router) {
  return router.score == RouterScore::kSoftmax && router.renormalize == Renormalize::kSum &&
         router.epsilon == 0;
}

void set_groups(DeviceRouteRule& rule) {
  const auto groups = static_cast<int32_t>(rule.choose.num_groups);
  rule.group_size = rule.num_columns / groups;
  rule.group_stride = rule.group_size + (rule.group_size % 8 == 0 ? 4 : 0);
  const auto size = static_cast<uint32_t>(rule.group_size);
  rule.group_inverse = ((1U << kInverseBits) + size - 1) / size;
  while (rule.lanes_a_group * 2 * groups <= 32) rule.lanes_a_group *= 2;
}

// Each lane holds columns_a_lane columns side by side.
void set_group_lanes(DeviceRouteRule& rule) {
  const int32_t columns = columns_a_lane(rule);
  const int32_t lanes = rule.group_size / columns;
  const bool whole = rule.group_size % columns == 0 && lanes <= 32;
  if (whole && std::has_single_bit(static_cast<uint32_t>(lanes))) rule.group_lanes = lanes;
}

void set_float_keys(DeviceRouteRule& rule) {
  rule.num_candidates = std::min({rule.top_k + kSpareCandidates, rule.num_columns, 32});
  const bool has_spare = rule.num_candidates > rule.top_k || rule.top_k == rule.num_columns;
  // Rounded scores tie often, and no family has more groups than a warp has lanes.
  rule.float_keys =
      rule.choose.score_dtype == DType::kF32 && rule.choose.num_groups <= 32 && has_spare;
  const bool masked_is_a_key =
      rule.choose.has_groups() && rule.choose.group_mask == GroupMask::kZero;
  rule.resolves_close = !rule.softmax_all && !masked_is_a_key;
}

}  // namespace

Support device_router_supports(const MoeSpec& spec) {
  const int64_t columns = spec.num_experts + spec.num_zero_experts;
  const auto at_most = [](const char* what, int64_t found, int64_t limit) {
    if (found <= limit) return Support::yes();
    return Support::no(std::string(what) + " " + std::to_string(found) + " exceeds " +
                       std::to_string(limit));
  };
  switch (router_rule(spec.router.name)) {
    case RouterRule::kCustom:
      return Support::no("router " + spec.router.name + " is code of the host");
    case RouterRule::kSparseMixer:
      return sparse_mixer_supports(spec);
    case RouterRule::kSimulated:
      if (Support support = simulated_supports(spec); !support) return support;
      return at_most("num_experts", spec.num_experts, kMaxSimulatedExperts);
    case RouterRule::kHash:
      if (Support support = hash_supports(spec); !support) return support;
      break;
    case RouterRule::kSinkSoftmax:
      if (Support support = sink_softmax_supports(spec); !support) return support;
      if (spec.top_k + spec.shared.count > kMaxSinkTerms) {
        return at_most("top_k with shared experts", spec.top_k + spec.shared.count, kMaxSinkTerms);
      }
      break;
    case RouterRule::kTopk:
      break;
  }
  if (columns > kMaxDeviceColumns)
    return at_most("experts to choose from:", columns, kMaxDeviceColumns);
  return at_most("top_k", spec.top_k, kMaxDeviceTopK);
}

MoeSpec sink_choice_spec(const MoeSpec& spec) {
  MoeSpec choice = spec;
  choice.router.name = "topk";
  choice.router.score = RouterScore::kSigmoid;
  choice.router.order = RouterOrder::kScoreThenTopk;
  choice.router.renormalize = Renormalize::kNone;
  return choice;
}

DeviceRouteRule device_route_rule(const MoeSpec& spec, Choices choices) {
  DeviceRouteRule rule{.score = ScoreRule::of(spec.router),
                       .weigh = WeighRule::of(spec),
                       .choose = ChooseRule::of(spec)};
  rule.num_columns = static_cast<int32_t>(rule.choose.num_columns);
  rule.num_experts = static_cast<int32_t>(spec.num_experts);
  rule.top_k = static_cast<int32_t>(spec.top_k);
  rule.by_logit = rule.choose.by_logit && !rule.choose.has_groups();
  rule.slot_lanes = static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(spec.top_k)));
  if (rule.choose.has_groups()) set_groups(rule);
  if (choices == Choices::kMade && rule.by_logit && is_softmax_of_chosen(spec.router)) {
    rule.score.order = RouterOrder::kTopkThenScore;
    rule.weigh.renormalize = Renormalize::kNone;
  }
  rule.softmax_all =
      rule.score.score == RouterScore::kSoftmax && rule.score.order == RouterOrder::kScoreThenTopk;
  set_float_keys(rule);
  if (rule.group_size != 0) set_group_lanes(rule);
  return rule;
}

int32_t columns_a_lane(const DeviceRouteRule& rule) {
  return static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(ceil_div(rule.num_columns, 32))));
}

}  // namespace conclave::inline v0::routing

#include "core/checked.h"
#include "routing/cuda/device_router.h"
#include "routing/cuda/route.h"

#include <algorithm>
#include <bit>

namespace conclave::inline v0::routing {
namespace {

constexpr int64_t kSharedBytes = 48 * 1024;
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

Support device_route_supports(const MoeSpec& spec) {
  const int64_t columns = spec.num_experts + spec.num_zero_experts;
  if (Support support = at_most("experts to choose from:", columns, kMaxDeviceColumns); !support) {
    return support;
  }
  return at_most("top_k", spec.top_k, columns);
}

DeviceRoutePlan plan_device_route(const MoeSpec& spec) {
  DeviceRoutePlan plan{.made = device_route_rule(spec, Choices::kMade),
                       .given = device_route_rule(spec, Choices::kGiven)};
  const bool is_wide = spec.top_k > kLaneSlots;
  const int32_t scratch =
      is_wide ? wide_scratch_doubles(plan.made) : route_scratch_doubles(plan.made);
  const int64_t scratch_bytes = scratch * int64_t{sizeof(double)};
  const int32_t columns = columns_a_lane(plan.made);
  plan.kernel = is_wide ? wide_route_kernel_of(columns) : route_kernel_of(columns);
  // 512 groups of two experts take 16 KiB per warp.
  plan.warps = scratch_bytes * kRouteWarps <= kSharedBytes ? kRouteWarps : 2;
  plan.shared_bytes = static_cast<size_t>(scratch_bytes * plan.warps);
  return plan;
}

void choose_by_route(const DeviceRoutePlan& plan, const DeviceRouterArgs& args,
                     CUstream_st* stream) {
  device_route(plan,
               {.logits = args.logits,
                .logits_dtype = args.logits_dtype,
                .logits_stride = args.logits_stride,
                .num_tokens = args.num_tokens,
                .live_tokens = args.live_tokens,
                .padding_mask = args.padding_mask,
                .selection_bias = args.selection_bias,
                .topk_ids = args.ids,
                .topk_weights = args.weights,
                .tokens_without_finite_logit = args.tokens_without_finite_logit},
               stream);
}

}  // namespace conclave::inline v0::routing

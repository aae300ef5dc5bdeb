#include "layer/stages/cuda/limits.h"

#include "core/row_stride.h"
#include "cuda/memory_place.h"
#include "dispatch/cuda/sanitize_ids.h"
#include "layer/choice_limits.h"
#include "routing/cuda/limits.h"
#include "routing/cuda/route.h"
#include "routing/limits.h"

namespace conclave::inline v0 {
namespace {

using enum CudaBuffer;

int64_t num_columns(const MoeSpec& spec) { return spec.num_experts + spec.num_zero_experts; }

routing::DeviceCallBans call_bans(const CudaChunk& chunk) {
  const MoeSpec& spec = chunk.plan.spec;
  return routing::DeviceCallBans::in(chunk.scratch.at<void>(kCallBans), spec.num_experts,
                                     num_columns(spec));
}

// The logits with those of banned experts lowered. Captures have them as they were.
void mask(const CudaChunk& chunk, routing::DeviceRouterArgs& call) {
  if (!call.banned.any() || call.logits == nullptr) return;
  const MoeSpec& spec = chunk.plan.spec;
  auto* const masked = chunk.scratch.at<float>(kLogits);
  routing::mask_logits({.router = call,
                        .num_logits = num_logits(spec),
                        .num_columns = num_columns(spec),
                        .to = masked},
                       chunk.stream);
  call.logits = masked;
  call.logits_dtype = DType::kF32;
  call.logits_stride = num_logits(spec);
}

// A router that leaves weights to the route kernel: the ids as chosen, zero experts among them.
CudaChoices weigh(const CudaChunk& chunk, const routing::DeviceRoutePlan& plan,
                  const routing::DeviceRouterArgs& call, const int32_t* ids) {
  const CudaWeights& weights = chunk.weights;
  const CudaChoices made{.ids = call.ids, .weights = call.weights};
  routing::device_route(plan,
                        {.logits = call.logits,
                         .logits_dtype = call.logits_dtype,
                         .logits_stride = call.logits_stride,
                         .num_tokens = call.num_tokens,
                         .live_tokens = call.live_tokens,
                         .padding_mask = call.padding_mask,
                         .selection_bias = weights.floats(weights::kSelectionBias),
                         .expert_scale = weights.floats(weights::kExpertScale),
                         .global_scale = weights.floats(weights::kGlobalScale),
                         .given_ids = ids,
                         .topk_ids = chunk.scratch.at<int32_t>(kTopkIds),
                         .topk_weights = chunk.scratch.at<float>(kTopkWeights),
                         .captured_ids = call.ids,
                         .captured_weights = call.weights,
                         .tokens_without_finite_logit = call.tokens_without_finite_logit},
                        chunk.stream);
  return made;
}

// Rows of `from_slots` choices as rows of k, within the limits. No launch writes where it reads.
CudaChoices spread(const CudaChunk& chunk, const CudaLimits& limits, const LiveRows& live,
                   const CudaChoices& made, int64_t from_slots, CudaCounts counts) {
  const MoeSpec& spec = chunk.plan.spec;
  auto* const limited = chunk.scratch.at<int32_t>(kLimitedIds);
  auto* const ids = made.ids != limited ? limited : chunk.scratch.at<int32_t>(kGivenIds);
  auto* const weights = chunk.scratch.at<float>(kLimitedWeights);
  const bool misses =
      limits.misses_choices && counts == CudaCounts::kAdd && limits.banned.rows != nullptr;
  routing::limit_slots({.ids = made.ids,
                        .weights = made.weights,
                        .from_slots = static_cast<int32_t>(from_slots),
                        .few = static_cast<int32_t>(limits.top_k),
                        .slots = static_cast<int32_t>(spec.top_k),
                        .num_tokens = chunk.count,
                        .num_columns = num_columns(spec),
                        .banned = limits.banned,
                        .drops_weightless = limits.drops_weightless,
                        .to_ids = ids,
                        .to_weights = weights,
                        .missing_choices = misses ? &chunk.counters->skipped_ids : nullptr,
                        .live_tokens = live.tokens,
                        .padding_mask = live.padding_mask},
                       chunk.stream);
  return {.ids = ids, .weights = weights};
}

}  // namespace

CudaCallLimits limits_of_call(const CudaPlan& plan, const ForwardArgs& args) {
  CudaCallLimits limits{.any = ChoiceLimits::of(args).any()};
  if (!limits.any) return limits;
  if (!args.banned_experts.empty()) {
    limits.reads_own_flags =
        cuda::is_on_device("banned_experts", args.banned_experts.data, plan.device.ordinal);
  }
  const bool on_host = !args.banned_experts.empty() && !limits.reads_own_flags;
  limits.bans_for_all = on_host || args.expert_budget != 0;
  return limits;
}

void begin_limits(const CudaChunk& chunk, const ForwardArgs& call) {
  if (!chunk.limits.bans_for_all) return;
  const bool on_host = !call.banned_experts.empty() && !chunk.limits.reads_own_flags;
  const auto* const flags =
      on_host ? static_cast<const uint8_t*>(call.banned_experts.data) : nullptr;
  routing::begin_call_bans(call_bans(chunk), flags, chunk.stream);
}

void end_budget(const CudaChunk& chunk, const ForwardArgs& call) {
  routing::ban_beyond_budget(call_bans(chunk), call.expert_budget, chunk.stream);
}

CudaLimits limits_of_chunk(const CudaChunk& chunk, const ForwardArgs& args) {
  if (!chunk.limits.any) return {};
  const MoeSpec& spec = chunk.plan.spec;
  CudaLimits limits{.top_k = args.top_k != 0 ? args.top_k : spec.top_k,
                    .misses_choices = args.topk_ids.empty() && !routing::recalls_choices(spec)};
  if (chunk.limits.reads_own_flags) {
    const routing::Banned own = bans_of(args.banned_experts);
    limits.banned = {.rows = own.rows, .stride = own.stride};
  }
  if (chunk.limits.bans_for_all) limits.banned.left_out = call_bans(chunk).left_out;
  limits.drops_weightless =
      limits.banned.any() && args.topk_ids.empty() && routing::bans_leave_groups(spec);
  return limits;
}

CudaChoices choose_within_limits(const CudaChunk& chunk, const CudaLimits& limits,
                                 const routing::DeviceRouterArgs& call, CudaCounts counts) {
  const auto top_k = static_cast<int32_t>(chunk.plan.spec.top_k);
  routing::DeviceRouterArgs own = call;
  own.banned = limits.banned;
  own.table_columns = top_k;
  own.ids = chunk.scratch.at<int32_t>(kRouterIds);
  own.weights = chunk.scratch.at<float>(kRouterWeights);
  if (counts == CudaCounts::kNone) own.tokens_without_finite_logit = own.skipped_ids = nullptr;
  mask(chunk, own);
  if (own.given_ids != nullptr && limits.top_k < top_k) {
    auto* const first = chunk.scratch.at<int32_t>(kLimitedIds);
    routing::keep_first_slots(own.given_ids, chunk.count, top_k, static_cast<int32_t>(limits.top_k),
                              first, chunk.stream);
    own.given_ids = first;
  }
  const routing::DeviceRouter& router = chunk.plan.router_of(limits.top_k);
  CudaChoices made{.ids = router.route(own, chunk.stream), .weights = own.weights};
  if (const routing::DeviceRoutePlan* finish = router.finish()) {
    made = weigh(chunk, *finish, own, made.ids);
  }
  return spread(chunk, limits, {.tokens = own.live_tokens, .padding_mask = own.padding_mask}, made,
                limits.top_k, counts);
}

CudaChoices keep_within_limits(const CudaChunk& chunk, const CudaGiven& given) {
  const MoeSpec& spec = chunk.plan.spec;
  const CudaChoices checked{.ids = chunk.scratch.at<int32_t>(kGivenIds),
                            .weights = chunk.scratch.at<float>(kRouterWeights)};
  dispatch::device_sanitize_ids({.given_ids = given.topk_ids.data,
                                 .ids_dtype = given.topk_ids.dtype,
                                 .ids_stride = row_stride(given.topk_ids),
                                 .given_weights = given.topk_weights.data,
                                 .weights_dtype = given.topk_weights.dtype,
                                 .weights_stride = row_stride(given.topk_weights),
                                 .num_tokens = chunk.count,
                                 .live_tokens = given.live.tokens,
                                 .padding_mask = given.live.padding_mask,
                                 .top_k = static_cast<int32_t>(spec.top_k),
                                 .num_experts = static_cast<int32_t>(spec.num_experts),
                                 .num_zero_experts = static_cast<int32_t>(spec.num_zero_experts),
                                 .captured_ids = chunk.scratch.at<int32_t>(kGivenIds),
                                 .captured_weights = chunk.scratch.at<float>(kRouterWeights),
                                 .skipped_ids = &chunk.counters->skipped_ids},
                                chunk.stream);
  return spread(chunk, given.limits, given.live, checked, spec.top_k, CudaCounts::kAdd);
}

void count_choices(const CudaChunk& chunk, const CudaGiven& given, const CudaChoices& choices) {
  routing::add_expert_weights(call_bans(chunk),
                              {.ids = choices.ids,
                               .weights = choices.weights,
                               .num_tokens = chunk.count,
                               .slots = static_cast<int32_t>(chunk.plan.spec.top_k),
                               .live_tokens = given.live.tokens,
                               .padding_mask = given.live.padding_mask},
                              chunk.stream);
}

}  // namespace conclave::inline v0

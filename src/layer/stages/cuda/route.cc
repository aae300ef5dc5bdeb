#include "layer/stages/cuda/route.h"

#include "core/row_stride.h"
#include "core/shared_facts.h"
#include "dispatch/cuda/sanitize_ids.h"
#include "gemm/cuda/gate_product.h"
#include "layer/cuda/launch_tables.h"
#include "layer/cuda/route_and_group.h"
#include "layer/cuda/row_format.h"
#include "layer/stages/cuda/factors.h"
#include "layer/stages/cuda/limits.h"
#include "layer/stages/cuda/prepare_rows.h"
#include "layer/stages/cuda/rows.h"
#include "routing/cuda/device_router.h"
#include "routing/cuda/route.h"

namespace conclave::inline v0 {
namespace {

using enum CudaBuffer;

// Enqueues the layer's own gate on the chunk; the logits are dense float32.
void enqueue_gate(const CudaChunk& chunk, const ConstTensorView& rows, float* logits) {
  const MoeSpec& spec = chunk.plan.spec;
  const CudaWeights& weights = chunk.weights;
  const CudaLayerWeight& gate = weights.own[weights::kRouter];
  gemm::device_gate_product({.rows = rows.data,
                             .rows_dtype = rows.dtype,
                             .rows_stride = row_stride(rows),
                             .num_tokens = chunk.count,
                             .hidden_size = spec.hidden_size,
                             .weights = gate.memory.as(),
                             .weights_dtype = gate.dtype,
                             .weights_stride = padded_row(spec.hidden_size, gate.dtype),
                             .num_logits = num_logits(spec),
                             .bias = weights.floats(weights::kRouterBias),
                             .logits_dtype = spec.router.logits_dtype,
                             .norm_weight = weights.floats(weights::kRouterInputScale),
                             .norm_epsilon = spec.router.input_norm.epsilon,
                             .workspace = chunk.scratch.at<void>(kGate),
                             .logits = logits},
                            gate_kernel(chunk.plan.gates.router, chunk.count), chunk.stream);
}

// Copies the logits for the caller.
void capture_logits(const CudaChunk& chunk, const CudaLogits& logits, const TensorView& captured) {
  convert_rows({.rows = logits.data,
                .dtype = logits.dtype,
                .row_stride = logits.stride,
                .num_rows = chunk.count,
                .columns = num_logits(chunk.plan.spec),
                .out = captured.data,
                .out_dtype = DType::kF32,
                .out_stride = row_stride(captured)},
               chunk.stream);
}

bool is_dense(const ConstTensorView& view) { return row_stride(view) == view.shape[1]; }

// True if the caller's ids and weights can be read in place, apart from the type of the ids.
bool has_plain_routing(const MoeSpec& spec, const CudaGiven& given, const CudaCaptures& captures) {
  if (given.topk_ids.empty() || given.topk_weights.empty()) return false;
  const bool dense = is_dense(given.topk_ids) && is_dense(given.topk_weights) &&
                     given.topk_weights.dtype == DType::kF32;
  return dense && !given.limits.any() && captures.ids.empty() && captures.weights.empty() &&
         given.live.padding_mask == nullptr && spec.num_zero_experts == 0 &&
         !shared_facts(spec).has_slots();
}

// The work of one call of the stage: its arguments, and what follows from them.
struct Work : CudaRouteArgs {
  Work(const CudaChunk& chunk, const CudaRouteArgs& args)
      : CudaRouteArgs(args),
        shared_weights(shared_facts(chunk.plan.spec).by_router()
                           ? chunk.scratch.at<float>(kSharedFactor)
                           : nullptr),
        own_factors(args.factors) {
    if (shared_weights != nullptr) own_factors.shared = shared_weights;
    shared = shared_slots(chunk.plan, own_factors);
  }

  float* shared_weights;    // [T, S]: the router writes them; or null
  CudaFactors own_factors;  // those given, or the router's
  SharedSlots shared;       // slots of fused shared experts
};

// The stage itself writes these; groups come later.
CudaRouting own_routing(const CudaChunk& chunk, const Work& args) {
  return {.topk_ids = chunk.scratch.at<int32_t>(kTopkIds),
          .topk_weights = chunk.scratch.at<float>(kTopkWeights),
          .identity = chunk.scratch.find<float>(kIdentity),
          .live = args.given.live,
          .factors = args.own_factors,
          .groups = {}};
}

// The common arguments of sanitising, whoever made the ids and weights.
dispatch::DeviceSanitizeArgs sanitize_args(const CudaChunk& chunk, const Work& args) {
  const MoeSpec& spec = chunk.plan.spec;
  const CudaCaptures& captures = args.captures;
  return {.num_tokens = chunk.count,
          .live_tokens = args.given.live.tokens,
          .padding_mask = args.given.live.padding_mask,
          .top_k = static_cast<int32_t>(spec.top_k),
          .num_experts = static_cast<int32_t>(spec.num_experts),
          .num_zero_experts = static_cast<int32_t>(spec.num_zero_experts),
          .shared = args.shared,
          .topk_ids = chunk.scratch.at<int32_t>(kTopkIds),
          .topk_weights = chunk.scratch.at<float>(kTopkWeights),
          .identity = chunk.scratch.find<float>(kIdentity),
          .captured_ids = capture<int32_t>(captures.ids),
          .captured_weights = capture<float>(captures.weights),
          .captured_ids_stride = capture_stride(captures.ids),
          .captured_weights_stride = capture_stride(captures.weights),
          .skipped_ids = &chunk.counters->skipped_ids};
}

// Checks ids and weights that an earlier step or the caller has made.
CudaRouting enqueue_made(const CudaChunk& chunk, const Work& args, const ConstTensorView& ids,
                         const ConstTensorView& weights) {
  dispatch::DeviceSanitizeArgs made = sanitize_args(chunk, args);
  made.given_ids = ids.data;
  made.ids_dtype = ids.dtype;
  made.ids_stride = row_stride(ids);
  made.given_weights = weights.data;
  made.weights_dtype = weights.dtype;
  made.weights_stride = row_stride(weights);
  CudaRouting routing = own_routing(chunk, args);
  if (args.group == nullptr) {
    dispatch::device_sanitize_ids(made, chunk.stream);
  } else {
    routing.groups = dispatch::device_sanitize_and_group(made, *args.group, chunk.stream);
  }
  return routing;
}

// Checks ids that come without weights; the router weighs them later.
const int32_t* choices_to_weigh(const CudaChunk& chunk, const CudaGiven& given) {
  const ConstTensorView& ids = given.topk_ids;
  if (ids.empty()) return nullptr;
  const MoeSpec& spec = chunk.plan.spec;
  auto* const checked = chunk.scratch.at<int32_t>(kGivenIds);
  dispatch::device_sanitize_ids({.given_ids = ids.data,
                                 .ids_dtype = ids.dtype,
                                 .ids_stride = row_stride(ids),
                                 .num_tokens = chunk.count,
                                 .live_tokens = given.live.tokens,
                                 .padding_mask = given.live.padding_mask,
                                 .top_k = static_cast<int32_t>(spec.top_k),
                                 .num_experts = static_cast<int32_t>(spec.num_experts),
                                 .num_zero_experts = static_cast<int32_t>(spec.num_zero_experts),
                                 .captured_ids = checked,
                                 .skipped_ids = &chunk.counters->skipped_ids},
                                chunk.stream);
  return checked;
}

// Runs the route kernel, which chooses or weighs `choices`.
CudaRouting enqueue_route(const CudaChunk& chunk, const Work& args,
                          const routing::DeviceRoutePlan& plan, const int32_t* choices) {
  const CudaWeights& weights = chunk.weights;
  const CudaCaptures& captures = args.captures;
  CudaRouting routing = own_routing(chunk, args);
  const routing::DeviceRouteArgs call{
      .logits = args.logits.data,
      .logits_dtype = args.logits.dtype,
      .logits_stride = args.logits.stride,
      .num_tokens = chunk.count,
      .live_tokens = args.given.live.tokens,
      .padding_mask = args.given.live.padding_mask,
      .selection_bias = weights.floats(weights::kSelectionBias),
      .expert_scale = weights.floats(weights::kExpertScale),
      .global_scale = weights.floats(weights::kGlobalScale),
      .given_ids = choices,
      .shared = args.shared,
      .topk_ids = chunk.scratch.at<int32_t>(kTopkIds),
      .topk_weights = chunk.scratch.at<float>(kTopkWeights),
      .identity = chunk.scratch.find<float>(kIdentity),
      .captured_ids = capture<int32_t>(captures.ids),
      .captured_weights = capture<float>(captures.weights),
      .captured_ids_stride = capture_stride(captures.ids),
      .captured_weights_stride = capture_stride(captures.weights),
      .tokens_without_finite_logit = &chunk.counters->tokens_without_finite_logit};
  if (args.group == nullptr) {
    routing::device_route(plan, call, chunk.stream);
  } else {
    routing.groups = device_route_and_group(plan, call, *args.group, chunk.stream);
  }
  return routing;
}

routing::DeviceRouterArgs router_args(const CudaChunk& chunk, const Work& args,
                                      const int32_t* choices) {
  const CudaWeights& weights = chunk.weights;
  const CudaScratch& scratch = chunk.scratch;
  routing::DeviceRouterArgs router = {
      .logits = args.logits.data,
      .logits_dtype = args.logits.dtype,
      .logits_stride = args.logits.stride,
      .num_tokens = chunk.count,
      .first_token = chunk.begin,
      .live_tokens = args.given.live.tokens,
      .padding_mask = args.given.live.padding_mask,
      .given_ids = choices,
      .token_ids = args.given.token_ids.data,
      .token_ids_dtype = args.given.token_ids.dtype,
      .selection_bias = weights.floats(weights::kSelectionBias),
      .global_scale = weights.floats(weights::kGlobalScale),
      .ids = scratch.find<int32_t>(kRouterIds),
      .weights = scratch.find<float>(kRouterWeights),
      .shared_weights = args.shared_weights,
      .tokens_without_finite_logit = &chunk.counters->tokens_without_finite_logit,
      .skipped_ids = &chunk.counters->skipped_ids};
  for (size_t place = 0; place < weights.router_tensors.size(); ++place) {
    router.tensors[place] = weights.router_tensors[place].as();
  }
  return router;
}

// Runs the layer's router. The last launch does the grouping.
CudaRouting enqueue_router(const CudaChunk& chunk, const Work& args) {
  const CudaPlan& plan = chunk.plan;
  const routing::DeviceRouterArgs call =
      router_args(chunk, args, choices_to_weigh(chunk, args.given));
  const int32_t* const ids = plan.router->route(call, chunk.stream);
  if (const routing::DeviceRoutePlan* finish = plan.router->finish()) {
    return enqueue_route(chunk, args, *finish, ids);
  }
  const int64_t top_k = plan.spec.top_k;
  return enqueue_made(chunk, args,
                      {.data = ids, .dtype = DType::kI32, .shape = {chunk.count, top_k}},
                      {.data = call.weights, .dtype = DType::kF32, .shape = {chunk.count, top_k}});
}

// Groups the caller's own ids, which the same launch checks and counts.
CudaRouting group_in_place(const CudaChunk& chunk, const Work& args) {
  const ConstTensorView& ids = args.given.topk_ids;
  CudaRouting routing = own_routing(chunk, args);
  dispatch::DeviceGroupArgs in_place = *args.group;
  in_place.num_tokens = chunk.count;
  in_place.live_tokens = routing.live.tokens;
  in_place.top_k = static_cast<int32_t>(chunk.plan.spec.top_k);
  in_place.skipped_ids = &chunk.counters->skipped_ids;
  if (ids.dtype == DType::kI64) {
    in_place.wide_ids = static_cast<const int64_t*>(ids.data);
    in_place.narrow_ids = chunk.scratch.at<int32_t>(kTopkIds);
  } else {
    in_place.topk_ids = static_cast<const int32_t*>(ids.data);
    routing.topk_ids = in_place.topk_ids;
  }
  routing.topk_weights = static_cast<const float*>(args.given.topk_weights.data);
  routing.groups = dispatch::device_group(in_place, chunk.stream);
  return routing;
}

// Routes within the limits of the call, in launches of its own for each step.
CudaRouting enqueue_limited(const CudaChunk& chunk, const Work& args) {
  const CudaGiven& given = args.given;
  const auto choose = [&] {
    return choose_within_limits(chunk, given.limits,
                                router_args(chunk, args, choices_to_weigh(chunk, given)),
                                CudaCounts::kAdd);
  };
  const CudaChoices made = given.topk_weights.empty() ? choose() : keep_within_limits(chunk, given);
  const Shape shape = {chunk.count, chunk.plan.spec.top_k};
  return enqueue_made(chunk, args, {.data = made.ids, .dtype = DType::kI32, .shape = shape},
                      {.data = made.weights, .dtype = DType::kF32, .shape = shape});
}

CudaRouting enqueue_choices(const CudaChunk& chunk, const Work& args) {
  const CudaGiven& given = args.given;
  if (given.limits.any()) return enqueue_limited(chunk, args);
  if (given.topk_weights.empty()) return enqueue_router(chunk, args);
  const CudaPlan& plan = chunk.plan;
  // Grouping in place cannot append slots.
  const bool in_place_fits =
      plan.fused.slots() == 0 && has_plain_routing(plan.spec, given, args.captures);
  if (args.group == nullptr || !in_place_fits) {
    return enqueue_made(chunk, args, given.topk_ids, given.topk_weights);
  }
  return group_in_place(chunk, args);
}

// Chooses logical experts, then the physical ones that serve them, and groups the latter.
CudaRouting enqueue_with_replicas(const CudaChunk& chunk, const Work& args) {
  Work ungrouped = args;
  ungrouped.group = nullptr;
  CudaRouting physical = enqueue_choices(chunk, ungrouped);
  auto* const ids = chunk.scratch.at<int32_t>(kPhysicalIds);
  const auto top_k = static_cast<int32_t>(chunk.plan.spec.top_k);
  choose_replicas({.ids = physical.topk_ids,
                   .num_tokens = chunk.count,
                   .live_tokens = physical.live.tokens,
                   .top_k = top_k,
                   .first_token = chunk.begin,
                   .first = chunk.weights.replica_first.as<int32_t>(),
                   .replicas = chunk.weights.replicas.as<int32_t>(),
                   .physical = ids,
                   .expert_load = args.captures.expert_load.data()},
                  chunk.stream);
  physical.topk_ids = ids;
  if (args.group == nullptr) return physical;
  dispatch::DeviceGroupArgs group = *args.group;
  group.topk_ids = ids;
  group.num_tokens = chunk.count;
  group.live_tokens = physical.live.tokens;
  group.top_k = top_k;
  group.expert_load = nullptr;
  physical.groups = dispatch::device_group(group, chunk.stream);
  return physical;
}

}  // namespace

LiveRows live_rows(const CudaChunk& chunk, const int64_t* of_call, const bool* padding_mask) {
  if (of_call == nullptr || chunk.is_whole_call) {
    return {.tokens = of_call, .padding_mask = padding_mask};
  }
  auto* const live = chunk.scratch.at<int64_t>(kLiveTokens);
  chunk_live_tokens(of_call, chunk.begin, chunk.count, live, chunk.stream);
  return {.tokens = live, .padding_mask = padding_mask};
}

CudaLogits make_logits(const CudaChunk& chunk, const ConstTensorView& router_logits,
                       const ConstTensorView& gate_rows, const TensorView& captured) {
  const CudaPlan& plan = chunk.plan;
  const bool is_read = plan.router_traits.reads_logits || (plan.spec.has_gate && !captured.empty());
  if (!is_read) return {};
  const int64_t columns = num_logits(plan.spec);
  CudaLogits logits;
  if (router_logits.empty()) {
    // The product goes straight into a dense capture, which then also serves the router.
    const bool direct = !captured.empty() && row_stride(captured) == columns;
    auto* const product = direct ? capture<float>(captured) : chunk.scratch.at<float>(kLogits);
    enqueue_gate(chunk, gate_rows, product);
    logits = {.data = product, .dtype = DType::kF32, .stride = columns};
    if (direct) return logits;
  } else {
    logits = {.data = router_logits.data,
              .dtype = router_logits.dtype,
              .stride = row_stride(router_logits)};
  }
  if (!captured.empty()) capture_logits(chunk, logits, captured);
  return logits;
}

std::optional<CudaRouting> routing_in_place(const MoeSpec& spec, const CudaGiven& given,
                                            const CudaCaptures& captures,
                                            const CudaFactors& factors) {
  const bool plain = has_plain_routing(spec, given, captures);
  if (!plain || given.topk_ids.dtype != DType::kI32) return std::nullopt;
  return CudaRouting{.topk_ids = static_cast<const int32_t*>(given.topk_ids.data),
                     .topk_weights = static_cast<const float*>(given.topk_weights.data),
                     .live = given.live,
                     .factors = factors,
                     .groups = {},
                     .is_checked = false};
}

CudaRouting enqueue_routing(const CudaChunk& chunk, const CudaRouteArgs& args) {
  const Work work(chunk, args);
  return chunk.plan.part.has_replicas() ? enqueue_with_replicas(chunk, work)
                                        : enqueue_choices(chunk, work);
}

void enqueue_budget_pass(const CudaChunk& chunk, const CudaLogits& logits, const CudaGiven& given) {
  const CudaCaptures captures{};
  const CudaFactors factors{};
  const Work work(chunk,
                  {.logits = logits, .given = given, .captures = captures, .factors = factors});
  const CudaChoices made = choose_within_limits(
      chunk, given.limits, router_args(chunk, work, nullptr), CudaCounts::kNone);
  count_choices(chunk, given, made);
}

}  // namespace conclave::inline v0

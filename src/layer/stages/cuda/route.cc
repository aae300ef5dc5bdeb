#include "layer/stages/cuda/route.h"

#include "dispatch/cuda/sanitize_ids.h"
#include "gemm/cuda/gate_product.h"
#include "layer/cuda/launch_tables.h"
#include "layer/cuda/route_and_group.h"
#include "layer/cuda/row_format.h"
#include "layer/stages/cuda/prepare_rows.h"
#include "layer/stages/cuda/rows.h"
#include "routing/cuda/device_router.h"
#include "routing/cuda/route.h"

namespace conclave::inline v0 {
namespace {

using enum CudaBuffer;

// The rows of a capture; null if the caller wants none.
template <class T>
T* capture(const TensorView& view) {
  return static_cast<T*>(view.data);
}

int64_t capture_stride(const TensorView& view) { return view.empty() ? 0 : stride_of_rows(view); }

struct Logits {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t stride = 0;
};

// Enqueues the layer's own gate on the chunk; the logits are dense float32.
void enqueue_gate(const CudaChunk& chunk, const ConstTensorView& rows, float* logits) {
  const MoeSpec& spec = chunk.plan.spec;
  const CudaWeights& weights = chunk.weights;
  gemm::device_gate_product({.rows = rows.data,
                             .rows_dtype = rows.dtype,
                             .rows_stride = stride_of_rows(rows),
                             .num_tokens = chunk.count,
                             .hidden_size = spec.hidden_size,
                             .weights = weights.gate.as(),
                             .weights_dtype = weights.gate_dtype,
                             .weights_stride = padded_row(spec.hidden_size, weights.gate_dtype),
                             .num_logits = num_logits(spec),
                             .bias = weights.router_bias.as<float>(),
                             .logits_dtype = spec.router.logits_dtype,
                             .norm_weight = weights.router_input_scale.as<float>(),
                             .norm_epsilon = spec.router.input_norm.epsilon,
                             .workspace = chunk.scratch.at<void>(kGate),
                             .logits = logits},
                            gate_kernel(chunk.plan.gates.router, chunk.count), chunk.stream);
}

// Copies the logits for the caller.
void capture_logits(const CudaChunk& chunk, const Logits& logits, const TensorView& captured) {
  convert_rows({.rows = logits.data,
                .dtype = logits.dtype,
                .row_stride = logits.stride,
                .num_rows = chunk.count,
                .columns = num_logits(chunk.plan.spec),
                .out = captured.data,
                .out_dtype = DType::kF32,
                .out_stride = stride_of_rows(captured)},
               chunk.stream);
}

// The logits: the caller's, or the gate's product.
Logits make_logits(const CudaChunk& chunk, const CudaRouteInputs& inputs,
                   const TensorView& captured) {
  const int64_t columns = num_logits(chunk.plan.spec);
  Logits logits;
  if (inputs.router_logits.empty()) {
    // The product goes straight into a dense capture, which then also serves the router.
    const bool direct = !captured.empty() && stride_of_rows(captured) == columns;
    auto* const product = direct ? capture<float>(captured) : chunk.scratch.at<float>(kLogits);
    enqueue_gate(chunk, inputs.gate_rows, product);
    logits = {.data = product, .dtype = DType::kF32, .stride = columns};
    if (direct) return logits;
  } else {
    logits = {.data = inputs.router_logits.data,
              .dtype = inputs.router_logits.dtype,
              .stride = stride_of_rows(inputs.router_logits)};
  }
  if (!captured.empty()) capture_logits(chunk, logits, captured);
  return logits;
}

// One chunk's routing in the making.
struct Call {
  const CudaChunk& chunk;
  const CudaRouteInputs& inputs;
  const CudaCaptures& captures;
  const SharedSlots& shared;
  const dispatch::DeviceGroupArgs* group = nullptr;

  int32_t* topk_ids() const { return chunk.scratch.at<int32_t>(kTopkIds); }
  float* topk_weights() const { return chunk.scratch.at<float>(kTopkWeights); }
  float* identity() const {
    return chunk.plan.spec.num_zero_experts > 0 ? chunk.scratch.at<float>(kIdentity) : nullptr;
  }
  // Without groups.
  CudaRouting routing() const {
    return {.topk_ids = topk_ids(),
            .topk_weights = topk_weights(),
            .identity = identity(),
            .live = inputs.live,
            .groups = {}};
  }
};

// The common arguments of sanitising, whoever made the ids and weights.
dispatch::DeviceSanitizeArgs sanitize_args(const Call& call) {
  const MoeSpec& spec = call.chunk.plan.spec;
  const CudaCaptures& captures = call.captures;
  return {.num_tokens = call.chunk.count,
          .live_tokens = call.inputs.live.tokens,
          .padding_mask = call.inputs.live.padding_mask,
          .top_k = static_cast<int32_t>(spec.top_k),
          .num_experts = static_cast<int32_t>(spec.num_experts),
          .num_zero_experts = static_cast<int32_t>(spec.num_zero_experts),
          .shared = call.shared,
          .topk_ids = call.topk_ids(),
          .topk_weights = call.topk_weights(),
          .identity = call.identity(),
          .captured_ids = capture<int32_t>(captures.ids),
          .captured_weights = capture<float>(captures.weights),
          .captured_ids_stride = capture_stride(captures.ids),
          .captured_weights_stride = capture_stride(captures.weights),
          .skipped_ids = &call.chunk.counters->skipped_ids};
}

// Arguments for the caller's ids and weights.
dispatch::DeviceSanitizeArgs given_routing(const Call& call) {
  const CudaRouteInputs& inputs = call.inputs;
  dispatch::DeviceSanitizeArgs given = sanitize_args(call);
  given.given_ids = inputs.topk_ids.data;
  given.ids_dtype = inputs.topk_ids.dtype;
  given.ids_stride = stride_of_rows(inputs.topk_ids);
  given.given_weights = inputs.topk_weights.data;
  given.weights_dtype = inputs.topk_weights.dtype;
  given.weights_stride = stride_of_rows(inputs.topk_weights);
  return given;
}

// Checks ids that come without weights; the router weighs them later.
const int32_t* choices_to_weigh(const Call& call) {
  const CudaChunk& chunk = call.chunk;
  const ConstTensorView& ids = call.inputs.topk_ids;
  if (ids.empty()) return nullptr;
  const MoeSpec& spec = chunk.plan.spec;
  auto* const checked = chunk.scratch.at<int32_t>(kGivenIds);
  dispatch::device_sanitize_ids({.given_ids = ids.data,
                                 .ids_dtype = ids.dtype,
                                 .ids_stride = stride_of_rows(ids),
                                 .num_tokens = chunk.count,
                                 .live_tokens = call.inputs.live.tokens,
                                 .padding_mask = call.inputs.live.padding_mask,
                                 .top_k = static_cast<int32_t>(spec.top_k),
                                 .num_experts = static_cast<int32_t>(spec.num_experts),
                                 .num_zero_experts = static_cast<int32_t>(spec.num_zero_experts),
                                 .captured_ids = checked,
                                 .skipped_ids = &chunk.counters->skipped_ids},
                                chunk.stream);
  return checked;
}

routing::DeviceRouteArgs route_args(const Call& call, const Logits& logits,
                                    const int32_t* choices) {
  const CudaWeights& weights = call.chunk.weights;
  const CudaCaptures& captures = call.captures;
  return {.logits = logits.data,
          .logits_dtype = logits.dtype,
          .logits_stride = logits.stride,
          .num_tokens = call.chunk.count,
          .live_tokens = call.inputs.live.tokens,
          .padding_mask = call.inputs.live.padding_mask,
          .selection_bias = weights.selection_bias.as<float>(),
          .expert_scale = weights.expert_scale.as<float>(),
          .global_scale = weights.global_scale.as<float>(),
          .given_ids = choices,
          .shared = call.shared,
          .topk_ids = call.topk_ids(),
          .topk_weights = call.topk_weights(),
          .identity = call.identity(),
          .captured_ids = capture<int32_t>(captures.ids),
          .captured_weights = capture<float>(captures.weights),
          .captured_ids_stride = capture_stride(captures.ids),
          .captured_weights_stride = capture_stride(captures.weights),
          .tokens_without_finite_logit = &call.chunk.counters->tokens_without_finite_logit};
}

// Checks ids and weights that an earlier step has made, [T, k] dense.
CudaRouting enqueue_made(const Call& call, const dispatch::DeviceSanitizeArgs& made) {
  CudaRouting routing = call.routing();
  if (call.group == nullptr) {
    dispatch::device_sanitize_ids(made, call.chunk.stream);
  } else {
    routing.groups = dispatch::device_sanitize_and_group(made, *call.group, call.chunk.stream);
  }
  return routing;
}

// Runs the route kernel, which chooses or weighs `choices`.
CudaRouting enqueue_route(const Call& call, const routing::DeviceRoutePlan& plan,
                          const Logits& logits, const int32_t* choices) {
  CudaRouting routing = call.routing();
  const routing::DeviceRouteArgs args = route_args(call, logits, choices);
  if (call.group == nullptr) {
    routing::device_route(plan, args, call.chunk.stream);
  } else {
    routing.groups = device_route_and_group(plan, args, *call.group, call.chunk.stream);
  }
  return routing;
}

routing::DeviceRouterArgs router_args(const Call& call, const Logits& logits,
                                      const int32_t* choices) {
  const CudaChunk& chunk = call.chunk;
  const CudaWeights& weights = chunk.weights;
  return {.logits = logits.data,
          .logits_dtype = logits.dtype,
          .logits_stride = logits.stride,
          .num_tokens = chunk.count,
          .first_token = chunk.begin,
          .live_tokens = call.inputs.live.tokens,
          .padding_mask = call.inputs.live.padding_mask,
          .given_ids = choices,
          .token_ids = call.inputs.token_ids.data,
          .token_ids_dtype = call.inputs.token_ids.dtype,
          .hash_table = weights.hash_table.as<int32_t>(),
          .replay_ids = weights.replay_ids.as<int32_t>(),
          .replay_weights = weights.replay_weights.as<float>(),
          .selection_bias = weights.selection_bias.as<float>(),
          .global_scale = weights.global_scale.as<float>(),
          .ids = chunk.scratch.at<int32_t>(kRouterIds),
          .weights = chunk.scratch.at<float>(kRouterWeights),
          .shared_weights = chunk.scratch.at<float>(kSharedFactor),
          .tokens_without_finite_logit = &chunk.counters->tokens_without_finite_logit,
          .skipped_ids = &chunk.counters->skipped_ids};
}

// Runs the layer's router. The last launch does the grouping.
CudaRouting enqueue_router(const Call& call) {
  const CudaPlan& plan = call.chunk.plan;
  const TensorView& captured = call.captures.logits;
  const bool reads_logits =
      plan.router_traits.reads_logits || (plan.spec.has_gate && !captured.empty());
  const Logits logits = reads_logits ? make_logits(call.chunk, call.inputs, captured) : Logits();
  const routing::DeviceRouterArgs args = router_args(call, logits, choices_to_weigh(call));
  const int32_t* const ids = plan.router->route(args, call.chunk.stream);
  if (const routing::DeviceRoutePlan* finish = plan.router->finish()) {
    return enqueue_route(call, *finish, logits, ids);
  }
  dispatch::DeviceSanitizeArgs made = sanitize_args(call);
  made.given_ids = ids;
  made.ids_dtype = DType::kI32;
  made.ids_stride = plan.spec.top_k;
  made.given_weights = args.weights;
  made.weights_dtype = DType::kF32;
  made.weights_stride = plan.spec.top_k;
  return enqueue_made(call, made);
}

bool is_dense(const ConstTensorView& view) { return stride_of_rows(view) == view.shape[1]; }

// True if the caller's ids and weights can be read in place, apart from the type of the ids.
bool has_plain_routing(const MoeSpec& spec, const CudaRouteInputs& inputs,
                       const CudaCaptures& captures) {
  if (inputs.topk_ids.empty() || inputs.topk_weights.empty()) return false;
  const bool dense = is_dense(inputs.topk_ids) && is_dense(inputs.topk_weights) &&
                     inputs.topk_weights.dtype == DType::kF32;
  return dense && captures.ids.empty() && captures.weights.empty() &&
         inputs.live.padding_mask == nullptr && spec.num_zero_experts == 0 &&
         spec.shared.mode != SharedMode::kFusedSlots;
}

// Groups the caller's own ids, which the same launch checks and counts.
CudaRouting group_in_place(const Call& call) {
  const CudaChunk& chunk = call.chunk;
  const ConstTensorView& ids = call.inputs.topk_ids;
  CudaRouting routing = call.routing();
  dispatch::DeviceGroupArgs in_place = *call.group;
  in_place.num_tokens = chunk.count;
  in_place.live_tokens = routing.live.tokens;
  in_place.top_k = static_cast<int32_t>(chunk.plan.spec.top_k);
  in_place.skipped_ids = &chunk.counters->skipped_ids;
  if (ids.dtype == DType::kI64) {
    in_place.wide_ids = static_cast<const int64_t*>(ids.data);
    in_place.narrow_ids = call.topk_ids();
    routing.topk_ids = in_place.narrow_ids;
  } else {
    in_place.topk_ids = static_cast<const int32_t*>(ids.data);
    routing.topk_ids = in_place.topk_ids;
  }
  routing.topk_weights = static_cast<const float*>(call.inputs.topk_weights.data);
  routing.groups = dispatch::device_group(in_place, chunk.stream);
  return routing;
}

CudaRouting enqueue_choices(const Call& call) {
  if (call.inputs.topk_weights.empty()) return enqueue_router(call);
  const CudaPlan& plan = call.chunk.plan;
  // Grouping in place cannot append slots.
  const bool in_place_fits =
      plan.fused.slots() == 0 && has_plain_routing(plan.spec, call.inputs, call.captures);
  if (call.group == nullptr || !in_place_fits) return enqueue_made(call, given_routing(call));
  return group_in_place(call);
}

// Chooses logical experts, then the physical ones that serve them, and groups the latter.
CudaRouting enqueue_with_replicas(const Call& call) {
  const CudaChunk& chunk = call.chunk;
  Call ungrouped = call;
  ungrouped.group = nullptr;
  CudaRouting physical = enqueue_choices(ungrouped);
  auto* const ids = chunk.scratch.at<int32_t>(kPhysicalIds);
  choose_replicas({.ids = physical.topk_ids,
                   .num_tokens = chunk.count,
                   .live_tokens = physical.live.tokens,
                   .top_k = static_cast<int32_t>(chunk.plan.spec.top_k),
                   .first_token = chunk.begin,
                   .first = chunk.weights.replica_first.as<int32_t>(),
                   .replicas = chunk.weights.replicas.as<int32_t>(),
                   .physical = ids,
                   .expert_load = call.captures.expert_load.data()},
                  chunk.stream);
  physical.topk_ids = ids;
  if (call.group == nullptr) return physical;
  dispatch::DeviceGroupArgs args = *call.group;
  args.topk_ids = ids;
  args.num_tokens = chunk.count;
  args.live_tokens = physical.live.tokens;
  args.top_k = static_cast<int32_t>(chunk.plan.spec.top_k);
  args.expert_load = nullptr;
  physical.groups = dispatch::device_group(args, chunk.stream);
  return physical;
}

}  // namespace

const int64_t* live_tokens(const CudaChunk& chunk, const int64_t* of_call) {
  if (of_call == nullptr || chunk.is_whole_call) return of_call;
  auto* const live = chunk.scratch.at<int64_t>(kLiveTokens);
  chunk_live_tokens(of_call, chunk.begin, chunk.count, live, chunk.stream);
  return live;
}

std::optional<CudaRouting> routing_in_place(const MoeSpec& spec, const CudaRouteInputs& inputs,
                                            const CudaCaptures& captures) {
  const bool plain = has_plain_routing(spec, inputs, captures);
  if (!plain || inputs.topk_ids.dtype != DType::kI32) return std::nullopt;
  return CudaRouting{.topk_ids = static_cast<const int32_t*>(inputs.topk_ids.data),
                     .topk_weights = static_cast<const float*>(inputs.topk_weights.data),
                     .live = inputs.live,
                     .groups = {}};
}

CudaRouting enqueue_routing(const CudaChunk& chunk, const CudaRouteInputs& inputs,
                            const CudaCaptures& captures, const SharedSlots& shared,
                            const dispatch::DeviceGroupArgs* group) {
  const Call call{
      .chunk = chunk, .inputs = inputs, .captures = captures, .shared = shared, .group = group};
  return chunk.plan.part.has_replicas() ? enqueue_with_replicas(call) : enqueue_choices(call);
}

}  // namespace conclave::inline v0

#include "layer/stages/cuda/route.h"

#include "dispatch/cuda/sanitize_ids.h"
#include "gemm/cuda/gate_product.h"
#include "layer/cuda/launch_tables.h"
#include "layer/cuda/route_and_group.h"
#include "layer/cuda/row_format.h"
#include "layer/stages/cuda/factors.h"
#include "layer/stages/cuda/prepare_rows.h"
#include "routing/cuda/device_router.h"
#include "routing/cuda/route.h"

namespace conclave::inline v0 {
namespace {

// The rows of a capture, or null if the caller wants none.
template <class T>
T* capture(const CudaCall& call, const TensorView& view) {
  return view.empty() ? nullptr : static_cast<T*>(chunk_data(call, view));
}

int64_t capture_stride(const TensorView& view) { return view.empty() ? 0 : stride_of_rows(view); }

struct Logits {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t stride = 0;
};

// Enqueues the layer's own gate on the chunk; the logits are dense float32.
void enqueue_gate(const CudaCall& call, float* logits) {
  const MoeSpec& spec = call.plan.spec;
  const CudaWeights& weights = call.weights;
  const ConstTensorView& input =
      call.args.router_input.empty() ? call.args.hidden : call.args.router_input;
  gemm::device_gate_product({.rows = chunk_data(call, input),
                             .rows_dtype = input.dtype,
                             .rows_stride = stride_of_rows(input),
                             .num_tokens = call.count,
                             .hidden_size = spec.hidden_size,
                             .weights = weights.gate.as(),
                             .weights_dtype = weights.gate_dtype,
                             .weights_stride = padded_row(spec.hidden_size, weights.gate_dtype),
                             .num_logits = num_logits(spec),
                             .bias = weights.router_bias.as<float>(),
                             .logits_dtype = spec.router.logits_dtype,
                             .norm_weight = weights.router_input_scale.as<float>(),
                             .norm_epsilon = spec.router.input_norm.epsilon,
                             .workspace = call.slice<void>(call.slices.gate),
                             .logits = logits},
                            gate_kernel(call.plan.gates.router, call.count), call.stream);
}

// Copies the logits for the caller.
void capture_logits(const CudaCall& call, const Logits& logits, float* captured) {
  convert_rows({.rows = logits.data,
                .dtype = logits.dtype,
                .row_stride = logits.stride,
                .num_rows = call.count,
                .columns = num_logits(call.plan.spec),
                .out = captured,
                .out_dtype = DType::kF32,
                .out_stride = stride_of_rows(call.args.captured_logits)},
               call.stream);
}

// The logits: the caller's, or the gate's product.
Logits make_logits(const CudaCall& call) {
  const ForwardArgs& args = call.args;
  const int64_t columns = num_logits(call.plan.spec);
  auto* const captured = capture<float>(call, args.captured_logits);
  Logits logits;
  if (args.router_logits.empty()) {
    // The product goes straight into a dense capture, which then also serves the router.
    const bool direct = captured != nullptr && stride_of_rows(args.captured_logits) == columns;
    float* const product = direct ? captured : call.slice<float>(call.slices.logits);
    enqueue_gate(call, product);
    logits = {.data = product, .dtype = DType::kF32, .stride = columns};
    if (direct) return logits;
  } else {
    logits = {.data = chunk_data(call, args.router_logits),
              .dtype = args.router_logits.dtype,
              .stride = stride_of_rows(args.router_logits)};
  }
  if (captured != nullptr) capture_logits(call, logits, captured);
  return logits;
}

CudaRouting empty_routing(const CudaCall& call) {
  CudaRouting routing;
  routing.topk_ids = call.slice<int32_t>(call.slices.topk_ids);
  routing.topk_weights = call.slice<float>(call.slices.topk_weights);
  if (call.plan.spec.num_zero_experts > 0) {
    routing.identity = call.slice<float>(call.slices.identity);
  }
  if (!call.args.padding_mask.empty()) {
    routing.padding_mask = static_cast<const bool*>(call.args.padding_mask.data) + call.begin;
  }
  if (call.args.num_tokens == nullptr) return routing;
  const bool one_chunk = call.begin == 0 && call.count == call.args.hidden.shape[0];
  if (one_chunk) {
    routing.live_tokens = call.args.num_tokens;
    return routing;
  }
  auto* const live = call.slice<int64_t>(call.slices.live_tokens);
  chunk_live_tokens(call.args.num_tokens, call.begin, call.count, live, call.stream);
  routing.live_tokens = live;
  return routing;
}

// The common arguments of sanitising, whoever made the ids and weights.
dispatch::DeviceSanitizeArgs sanitize_args(const CudaCall& call, const CudaRouting& routing) {
  const MoeSpec& spec = call.plan.spec;
  return {.num_tokens = call.count,
          .live_tokens = routing.live_tokens,
          .padding_mask = routing.padding_mask,
          .top_k = static_cast<int32_t>(spec.top_k),
          .num_experts = static_cast<int32_t>(spec.num_experts),
          .num_zero_experts = static_cast<int32_t>(spec.num_zero_experts),
          .shared = shared_slots(call),
          .topk_ids = call.slice<int32_t>(call.slices.topk_ids),
          .topk_weights = call.slice<float>(call.slices.topk_weights),
          .identity = const_cast<float*>(routing.identity),
          .captured_ids = capture<int32_t>(call, call.args.captured_ids),
          .captured_weights = capture<float>(call, call.args.captured_weights),
          .captured_ids_stride = capture_stride(call.args.captured_ids),
          .captured_weights_stride = capture_stride(call.args.captured_weights),
          .skipped_ids = &call.counters->skipped_ids};
}

// Arguments for the caller's ids and weights.
dispatch::DeviceSanitizeArgs given_routing(const CudaCall& call, const CudaRouting& routing) {
  const ForwardArgs& args = call.args;
  dispatch::DeviceSanitizeArgs given = sanitize_args(call, routing);
  given.given_ids = chunk_data(call, args.topk_ids);
  given.ids_dtype = args.topk_ids.dtype;
  given.ids_stride = stride_of_rows(args.topk_ids);
  given.given_weights = chunk_data(call, args.topk_weights);
  given.weights_dtype = args.topk_weights.dtype;
  given.weights_stride = stride_of_rows(args.topk_weights);
  return given;
}

// Checks ids that come without weights; the router weighs them later.
const int32_t* choices_to_weigh(const CudaCall& call, const CudaRouting& routing) {
  const ConstTensorView& ids = call.args.topk_ids;
  if (ids.empty()) return nullptr;
  const MoeSpec& spec = call.plan.spec;
  auto* const checked = call.slice<int32_t>(call.slices.given_ids);
  dispatch::device_sanitize_ids({.given_ids = chunk_data(call, ids),
                                 .ids_dtype = ids.dtype,
                                 .ids_stride = stride_of_rows(ids),
                                 .num_tokens = call.count,
                                 .live_tokens = routing.live_tokens,
                                 .padding_mask = routing.padding_mask,
                                 .top_k = static_cast<int32_t>(spec.top_k),
                                 .num_experts = static_cast<int32_t>(spec.num_experts),
                                 .num_zero_experts = static_cast<int32_t>(spec.num_zero_experts),
                                 .captured_ids = checked,
                                 .skipped_ids = &call.counters->skipped_ids},
                                call.stream);
  return checked;
}

routing::DeviceRouteArgs route_args(const CudaCall& call, const CudaRouting& routing,
                                    const Logits& logits, const int32_t* choices) {
  const CudaWeights& weights = call.weights;
  const ForwardArgs& args = call.args;
  return {.logits = logits.data,
          .logits_dtype = logits.dtype,
          .logits_stride = logits.stride,
          .num_tokens = call.count,
          .live_tokens = routing.live_tokens,
          .padding_mask = routing.padding_mask,
          .selection_bias = weights.selection_bias.as<float>(),
          .expert_scale = weights.expert_scale.as<float>(),
          .global_scale = weights.global_scale.as<float>(),
          .given_ids = choices,
          .shared = shared_slots(call),
          .topk_ids = call.slice<int32_t>(call.slices.topk_ids),
          .topk_weights = call.slice<float>(call.slices.topk_weights),
          .identity = const_cast<float*>(routing.identity),
          .captured_ids = capture<int32_t>(call, args.captured_ids),
          .captured_weights = capture<float>(call, args.captured_weights),
          .captured_ids_stride = capture_stride(args.captured_ids),
          .captured_weights_stride = capture_stride(args.captured_weights),
          .tokens_without_finite_logit = &call.counters->tokens_without_finite_logit};
}

// Checks ids and weights that an earlier step has made, [T, k] dense.
CudaRouting enqueue_made(const CudaCall& call, const dispatch::DeviceSanitizeArgs& made,
                         const dispatch::DeviceGroupArgs* group, CudaRouting routing) {
  if (group == nullptr) {
    dispatch::device_sanitize_ids(made, call.stream);
  } else {
    routing.groups = dispatch::device_sanitize_and_group(made, *group, call.stream);
  }
  return routing;
}

// Runs the route kernel, which chooses or weighs `choices`.
CudaRouting enqueue_route(const CudaCall& call, const routing::DeviceRoutePlan& plan,
                          const dispatch::DeviceGroupArgs* group, CudaRouting routing,
                          const Logits& logits, const int32_t* choices) {
  const routing::DeviceRouteArgs args = route_args(call, routing, logits, choices);
  if (group == nullptr) {
    routing::device_route(plan, args, call.stream);
  } else {
    routing.groups = device_route_and_group(plan, args, *group, call.stream);
  }
  return routing;
}

routing::DeviceRouterArgs router_args(const CudaCall& call, const CudaRouting& routing,
                                      const Logits& logits, const int32_t* choices) {
  const CudaWeights& weights = call.weights;
  const ConstTensorView& token_ids = call.args.token_ids;
  return {.logits = logits.data,
          .logits_dtype = logits.dtype,
          .logits_stride = logits.stride,
          .num_tokens = call.count,
          .first_token = call.begin,
          .live_tokens = routing.live_tokens,
          .padding_mask = routing.padding_mask,
          .given_ids = choices,
          .token_ids = token_ids.empty() ? nullptr : chunk_data(call, token_ids),
          .token_ids_dtype = token_ids.dtype,
          .hash_table = weights.hash_table.as<int32_t>(),
          .replay_ids = weights.replay_ids.as<int32_t>(),
          .replay_weights = weights.replay_weights.as<float>(),
          .selection_bias = weights.selection_bias.as<float>(),
          .global_scale = weights.global_scale.as<float>(),
          .ids = call.slice<int32_t>(call.slices.router_ids),
          .weights = call.slice<float>(call.slices.router_weights),
          .shared_weights = call.slice<float>(call.slices.shared_factor),
          .tokens_without_finite_logit = &call.counters->tokens_without_finite_logit,
          .skipped_ids = &call.counters->skipped_ids};
}

// Runs the layer's router. The last launch does the grouping.
CudaRouting enqueue_router(const CudaCall& call, const dispatch::DeviceGroupArgs* group,
                           const CudaRouting& routing) {
  const MoeSpec& spec = call.plan.spec;
  const routing::DeviceRouter& router = *call.plan.router;
  const bool reads_logits =
      call.plan.router_traits.reads_logits || (spec.has_gate && !call.args.captured_logits.empty());
  const Logits logits = reads_logits ? make_logits(call) : Logits();
  const routing::DeviceRouterArgs args =
      router_args(call, routing, logits, choices_to_weigh(call, routing));
  const int32_t* const ids = router.route(args, call.stream);
  if (const routing::DeviceRoutePlan* finish = router.finish()) {
    return enqueue_route(call, *finish, group, routing, logits, ids);
  }
  dispatch::DeviceSanitizeArgs made = sanitize_args(call, routing);
  made.given_ids = ids;
  made.ids_dtype = DType::kI32;
  made.ids_stride = spec.top_k;
  made.given_weights = args.weights;
  made.weights_dtype = DType::kF32;
  made.weights_stride = spec.top_k;
  return enqueue_made(call, made, group, routing);
}

bool is_dense(const ConstTensorView& view) { return stride_of_rows(view) == view.shape[1]; }

// True if the caller's ids and weights can be read in place, apart from the type of the ids.
bool has_plain_routing(const CudaCall& call) {
  const ForwardArgs& args = call.args;
  if (args.topk_ids.empty() || args.topk_weights.empty()) return false;
  const bool dense = is_dense(args.topk_ids) && is_dense(args.topk_weights) &&
                     args.topk_weights.dtype == DType::kF32;
  const bool captured = !args.captured_ids.empty() || !args.captured_weights.empty();
  return dense && !captured && args.padding_mask.empty() && call.plan.spec.num_zero_experts == 0 &&
         call.plan.spec.shared.mode != SharedMode::kFusedSlots;
}

// Groups the caller's own ids, which the same launch checks and counts.
void group_in_place(const CudaCall& call, const dispatch::DeviceGroupArgs& group,
                    CudaRouting& routing) {
  const ForwardArgs& args = call.args;
  dispatch::DeviceGroupArgs in_place = group;
  in_place.num_tokens = call.count;
  in_place.live_tokens = routing.live_tokens;
  in_place.top_k = static_cast<int32_t>(call.plan.spec.top_k);
  in_place.skipped_ids = &call.counters->skipped_ids;
  const void* const ids = chunk_data(call, args.topk_ids);
  if (args.topk_ids.dtype == DType::kI64) {
    in_place.wide_ids = static_cast<const int64_t*>(ids);
    in_place.narrow_ids = call.slice<int32_t>(call.slices.topk_ids);
    routing.topk_ids = in_place.narrow_ids;
  } else {
    in_place.topk_ids = static_cast<const int32_t*>(ids);
    routing.topk_ids = in_place.topk_ids;
  }
  routing.topk_weights = static_cast<const float*>(chunk_data(call, args.topk_weights));
  routing.groups = dispatch::device_group(in_place, call.stream);
}

CudaRouting enqueue_choices(const CudaCall& call, const dispatch::DeviceGroupArgs* group,
                            const CudaRouting& routing) {
  if (call.args.topk_weights.empty()) return enqueue_router(call, group, routing);
  // Grouping in place cannot append slots.
  const bool in_place_fits = call.plan.fused.slots() == 0 && has_plain_routing(call);
  if (group == nullptr || !in_place_fits) {
    return enqueue_made(call, given_routing(call, routing), group, routing);
  }
  CudaRouting in_place = routing;
  group_in_place(call, *group, in_place);
  return in_place;
}

// Chooses logical experts, then the physical ones that serve them, and groups the latter.
CudaRouting enqueue_with_replicas(const CudaCall& call, const dispatch::DeviceGroupArgs* group,
                                  const CudaRouting& routing) {
  CudaRouting physical = enqueue_choices(call, nullptr, routing);
  auto* const ids = call.slice<int32_t>(call.slices.physical_ids);
  choose_replicas({.ids = physical.topk_ids,
                   .num_tokens = call.count,
                   .live_tokens = routing.live_tokens,
                   .top_k = static_cast<int32_t>(call.plan.spec.top_k),
                   .first_token = call.begin,
                   .first = call.weights.replica_first.as<int32_t>(),
                   .replicas = call.weights.replicas.as<int32_t>(),
                   .physical = ids,
                   .expert_load = call.args.expert_load.data()},
                  call.stream);
  physical.topk_ids = ids;
  if (group == nullptr) return physical;
  dispatch::DeviceGroupArgs args = *group;
  args.topk_ids = ids;
  args.num_tokens = call.count;
  args.live_tokens = routing.live_tokens;
  args.top_k = static_cast<int32_t>(call.plan.spec.top_k);
  args.expert_load = nullptr;
  physical.groups = dispatch::device_group(args, call.stream);
  return physical;
}

}  // namespace

std::optional<CudaRouting> routing_in_place(const CudaCall& call) {
  if (!has_plain_routing(call) || call.args.topk_ids.dtype != DType::kI32) return std::nullopt;
  CudaRouting routing = empty_routing(call);
  enqueue_factors(call, routing.live_tokens, routing.padding_mask);
  routing.topk_ids = static_cast<const int32_t*>(chunk_data(call, call.args.topk_ids));
  routing.topk_weights = static_cast<const float*>(chunk_data(call, call.args.topk_weights));
  return routing;
}

CudaRouting enqueue_routing(const CudaCall& call, const dispatch::DeviceGroupArgs* group) {
  const CudaRouting routing = empty_routing(call);
  enqueue_factors(call, routing.live_tokens, routing.padding_mask);
  if (call.plan.part.has_replicas()) return enqueue_with_replicas(call, group, routing);
  return enqueue_choices(call, group, routing);
}

}  // namespace conclave::inline v0

#include "layer/cuda/routing_stage.h"

#include "dispatch/cuda/sanitize_ids.h"
#include "gemm/cuda/gate_product.h"
#include "layer/cuda/prepare_rows.h"
#include "layer/cuda/route_and_group.h"
#include "layer/cuda/row_format.h"
#include "routing/cuda/device_router.h"

namespace conclave::inline v0 {
namespace {

// Rows of a capture; null where none is wanted.
template <class T>
T* capture(const CudaCall& call, const TensorView& view) {
  return view.empty() ? nullptr : static_cast<T*>(chunk_data(call, view));
}

struct Logits {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t stride = 0;
};

// The layer's own gate on the chunk, dense float32 logits.
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
                            call.stream);
}

// A copy of the logits for the caller.
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

// The caller's, or the gate's product.
Logits make_logits(const CudaCall& call) {
  const ForwardArgs& args = call.args;
  const int64_t columns = num_logits(call.plan.spec);
  auto* const captured = capture<float>(call, args.captured_logits);
  Logits logits;
  if (args.router_logits.empty()) {
    // Straight into the capture where it is dense, too.
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

dispatch::DeviceSanitizeArgs given_routing(const CudaCall& call, const CudaRouting& routing) {
  const ForwardArgs& args = call.args;
  const MoeSpec& spec = call.plan.spec;
  dispatch::DeviceSanitizeArgs given{
      .given_ids = chunk_data(call, args.topk_ids),
      .ids_dtype = args.topk_ids.dtype,
      .ids_stride = stride_of_rows(args.topk_ids),
      .num_tokens = call.count,
      .live_tokens = routing.live_tokens,
      .padding_mask = routing.padding_mask,
      .top_k = static_cast<int32_t>(spec.top_k),
      .num_experts = static_cast<int32_t>(spec.num_experts),
      .num_zero_experts = static_cast<int32_t>(spec.num_zero_experts),
      .skipped_ids = &call.counters->skipped_ids};
  if (args.topk_weights.empty()) return given;
  given.given_weights = chunk_data(call, args.topk_weights);
  given.weights_dtype = args.topk_weights.dtype;
  given.weights_stride = stride_of_rows(args.topk_weights);
  given.topk_ids = call.slice<int32_t>(call.slices.topk_ids);
  given.topk_weights = call.slice<float>(call.slices.topk_weights);
  given.identity = const_cast<float*>(routing.identity);
  given.captured_ids = capture<int32_t>(call, args.captured_ids);
  given.captured_weights = capture<float>(call, args.captured_weights);
  return given;
}

// Ids without weights: checked, then weighed by the router.
const int32_t* choices_to_weigh(const CudaCall& call, const CudaRouting& routing) {
  if (call.args.topk_ids.empty()) return nullptr;
  dispatch::DeviceSanitizeArgs given = given_routing(call, routing);
  given.captured_ids = call.slice<int32_t>(call.slices.given_ids);
  dispatch::device_sanitize_ids(given, call.stream);
  return given.captured_ids;
}

routing::DeviceRouteArgs route_args(const CudaCall& call, const CudaRouting& routing) {
  const CudaWeights& weights = call.weights;
  const Logits logits = make_logits(call);
  return {.logits = logits.data,
          .logits_dtype = logits.dtype,
          .logits_stride = logits.stride,
          .num_tokens = call.count,
          .live_tokens = routing.live_tokens,
          .padding_mask = routing.padding_mask,
          .selection_bias = weights.selection_bias.as<float>(),
          .expert_scale = weights.expert_scale.as<float>(),
          .global_scale = weights.global_scale.as<float>(),
          .given_ids = choices_to_weigh(call, routing),
          .topk_ids = call.slice<int32_t>(call.slices.topk_ids),
          .topk_weights = call.slice<float>(call.slices.topk_weights),
          .identity = const_cast<float*>(routing.identity),
          .captured_ids = capture<int32_t>(call, call.args.captured_ids),
          .captured_weights = capture<float>(call, call.args.captured_weights),
          .tokens_without_finite_logit = &call.counters->tokens_without_finite_logit};
}

bool is_dense(const ConstTensorView& view) { return stride_of_rows(view) == view.shape[1]; }

// The caller's ids and weights can be read as they are, but for the type of the ids.
bool has_plain_routing(const CudaCall& call) {
  const ForwardArgs& args = call.args;
  if (args.topk_ids.empty() || args.topk_weights.empty()) return false;
  const bool dense = is_dense(args.topk_ids) && is_dense(args.topk_weights) &&
                     args.topk_weights.dtype == DType::kF32;
  const bool captured = !args.captured_ids.empty() || !args.captured_weights.empty();
  return dense && !captured && args.padding_mask.empty() && call.plan.spec.num_zero_experts == 0;
}

// Groups the caller's own ids, which are checked and counted on the way.
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

}  // namespace

std::optional<CudaRouting> routing_in_place(const CudaCall& call) {
  if (!has_plain_routing(call) || call.args.topk_ids.dtype != DType::kI32) return std::nullopt;
  CudaRouting routing = empty_routing(call);
  routing.topk_ids = static_cast<const int32_t*>(chunk_data(call, call.args.topk_ids));
  routing.topk_weights = static_cast<const float*>(chunk_data(call, call.args.topk_weights));
  return routing;
}

CudaRouting enqueue_routing(const CudaCall& call, const dispatch::DeviceGroupArgs* group) {
  CudaRouting routing = empty_routing(call);
  const MoeSpec& spec = call.plan.spec;
  if (group != nullptr && has_plain_routing(call)) {
    group_in_place(call, *group, routing);
    return routing;
  }
  if (!call.args.topk_weights.empty()) {
    const dispatch::DeviceSanitizeArgs given = given_routing(call, routing);
    if (group == nullptr) {
      dispatch::device_sanitize_ids(given, call.stream);
    } else {
      routing.groups = dispatch::device_sanitize_and_group(given, *group, call.stream);
    }
    return routing;
  }
  const routing::DeviceRouteArgs args = route_args(call, routing);
  if (group == nullptr) {
    routing::device_route(spec, args, call.stream);
  } else {
    routing.groups = device_route_and_group(spec, args, *group, call.stream);
  }
  return routing;
}

}  // namespace conclave::inline v0

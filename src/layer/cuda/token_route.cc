#include "layer/cuda/token_route.h"

#include "core/row_stride.h"
#include "cuda/device_info.h"
#include "cuda/memory_place.h"
#include "routing/cuda/device_router.h"
#include "routing/cuda/route.h"
#include "routing/router_tensors.h"

#include "conclave/interop/cuda.h"

#include <memory>
#include <string>
#include <vector>

namespace conclave::inline v0 {
namespace {

const float* floats(const char* name, const ConstTensorView& view) {
  if (view.empty() || view.dtype == DType::kF32) return static_cast<const float*>(view.data);
  throw Error(ErrorCode::kDType, {.what = "an argument has the wrong type",
                                  .tensor = name,
                                  .expected = "F32 on CUDA",
                                  .found = std::string(to_string(view.dtype))});
}

using OwnTensors = std::vector<routing::SizedRouterTensor>;

ConstTensorView view_of(const routing::SizedRouterTensor& own, const RouteArgs& args) {
  return routing::find_view(args, args.tensors, own.tensor->call_field, own.tensor->name);
}

void check_places(const RouteArgs& args, const OwnTensors& tensors, int32_t ordinal) {
  cuda::check_place("logits", args.logits.data, ordinal);
  cuda::check_place("selection_bias", args.selection_bias.data, ordinal);
  cuda::check_place("expert_scale", args.expert_scale.data, ordinal);
  cuda::check_place("global_scale", args.global_scale.data, ordinal);
  cuda::check_place("topk_ids", args.topk_ids.data, ordinal);
  cuda::check_place("topk_weights", args.topk_weights.data, ordinal);
  cuda::check_place("token_ids", args.token_ids.data, ordinal);
  for (const routing::SizedRouterTensor& own : tensors) {
    cuda::check_place(std::string(own.tensor->name), view_of(own, args).data, ordinal);
  }
  cuda::check_place("shared_weights", args.shared_weights.data, ordinal);
}

routing::DeviceRouteArgs route_args(const RouteArgs& args) {
  return {.logits = args.logits.data,
          .logits_dtype = args.logits.dtype,
          .logits_stride = args.logits.empty() ? 0 : row_stride(args.logits),
          .num_tokens = args.topk_ids.shape[0],
          .selection_bias = floats("selection_bias", args.selection_bias),
          .expert_scale = floats("expert_scale", args.expert_scale),
          .global_scale = floats("global_scale", args.global_scale),
          .topk_ids = static_cast<int32_t*>(args.topk_ids.data),
          .topk_weights = static_cast<float*>(args.topk_weights.data)};
}

routing::DeviceRouterArgs router_args(const RouteArgs& args, const OwnTensors& tensors) {
  routing::DeviceRouterArgs made = {
      .logits = args.logits.data,
      .logits_dtype = args.logits.dtype,
      .logits_stride = args.logits.empty() ? 0 : row_stride(args.logits),
      .num_tokens = args.topk_ids.shape[0],
      .token_ids = args.token_ids.data,
      .token_ids_dtype = args.token_ids.dtype,
      .selection_bias = floats("selection_bias", args.selection_bias),
      .global_scale = floats("global_scale", args.global_scale),
      .ids = static_cast<int32_t*>(args.topk_ids.data),
      .weights = static_cast<float*>(args.topk_weights.data),
      .shared_weights = static_cast<float*>(args.shared_weights.data)};
  for (const routing::SizedRouterTensor& own : tensors) {
    made.tensors[own.place.value()] = view_of(own, args).data;
  }
  return made;
}

void check_call(const RouteArgs& args, const OwnTensors& tensors, int32_t ordinal) {
  if (args.stream.handle == nullptr) {
    throw Error(ErrorCode::kNullPointer,
                {.what = "a call on CUDA needs a stream",
                 .tensor = "stream",
                 .hint = "conclave/interop/cuda.h: to_stream, also for the default stream"});
  }
  check_places(args, tensors, ordinal);
}

void enqueue(const routing::DeviceRouter& router, const OwnTensors& tensors, const RouteArgs& args,
             CUstream_st* stream) {
  routing::DeviceRouteArgs route = route_args(args);
  // Ids that the router writes lie in topk_ids, where each slot is read before it is written.
  route.given_ids = router.route(router_args(args, tensors), stream);
  const routing::DeviceRoutePlan* const finish = router.finish();
  if (finish != nullptr) routing::device_route(*finish, route, stream);
}

}  // namespace

Support cuda_routes(const MoeSpec& spec) {
  if (spec.num_zero_experts > 0) return Support::no("zero experts are routed on the host");
  const routing::DeviceRouterRow* const row = routing::find_device_router(spec);
  if (row != nullptr && row->runs_alone != nullptr) {
    if (Support alone = row->runs_alone(spec); !alone) return alone;
  }
  return routing::device_router_supports(spec);
}

RouteFunction make_cuda_route(int32_t ordinal, const MoeSpec& spec) {
  const std::shared_ptr<const routing::DeviceRouter> router =
      routing::find_device_router(spec)->make(spec);
  return [ordinal, router, tensors = routing::router_tensors_of(spec)](const RouteArgs& args) {
    check_call(args, tensors, ordinal);
    const cuda::DeviceGuard guard(ordinal);
    enqueue(*router, tensors, args, to_cuda(args.stream));
  };
}

}  // namespace conclave::inline v0

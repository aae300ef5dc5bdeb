#include "layer/cuda/token_route.h"

#include "core/router_rule.h"
#include "cuda/device_info.h"
#include "layer/cuda/memory_place.h"
#include "layer/cuda/routing_stage.h"
#include "routing/cuda/device_router.h"

#include "conclave/interop/cuda.h"

#include <string>

namespace conclave::inline v0 {
namespace {

const float* floats(const char* name, const ConstTensorView& view) {
  if (view.empty() || view.dtype == DType::kF32) return static_cast<const float*>(view.data);
  throw Error(ErrorCode::kDType, {.what = "an argument has the wrong type",
                                  .tensor = name,
                                  .expected = "F32 on CUDA",
                                  .found = std::string(to_string(view.dtype))});
}

void check_places(const RouteArgs& args, int32_t ordinal) {
  check_place("logits", args.logits.data, ordinal);
  check_place("selection_bias", args.selection_bias.data, ordinal);
  check_place("expert_scale", args.expert_scale.data, ordinal);
  check_place("global_scale", args.global_scale.data, ordinal);
  check_place("topk_ids", args.topk_ids.data, ordinal);
  check_place("topk_weights", args.topk_weights.data, ordinal);
}

}  // namespace

// The device's other rules need steps and counters that only a layer has.
Support cuda_routes(const MoeSpec& spec) {
  if (router_rule(spec.router.name) != RouterRule::kTopk) {
    return Support::no("router " + spec.router.name + " on its own runs on the host");
  }
  if (spec.num_zero_experts > 0) return Support::no("zero experts are routed on the host");
  return routing::device_router_supports(spec);
}

void cuda_route(int32_t ordinal, const MoeSpec& spec, const RouteArgs& args) {
  if (args.stream.handle == nullptr) {
    throw Error(ErrorCode::kNullPointer,
                {.what = "a call on CUDA needs a stream",
                 .tensor = "stream",
                 .hint = "conclave/interop/cuda.h: to_stream, also for the default stream"});
  }
  check_places(args, ordinal);
  const cuda::DeviceGuard guard(ordinal);
  routing::device_route(spec,
                        {.logits = args.logits.data,
                         .logits_dtype = args.logits.dtype,
                         .logits_stride = stride_of_rows(args.logits),
                         .num_tokens = args.logits.shape[0],
                         .selection_bias = floats("selection_bias", args.selection_bias),
                         .expert_scale = floats("expert_scale", args.expert_scale),
                         .global_scale = floats("global_scale", args.global_scale),
                         .topk_ids = static_cast<int32_t*>(args.topk_ids.data),
                         .topk_weights = static_cast<float*>(args.topk_weights.data)},
                        to_cuda(args.stream));
}

}  // namespace conclave::inline v0

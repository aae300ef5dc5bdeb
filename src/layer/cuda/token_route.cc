#include "layer/cuda/token_route.h"

#include "cuda/device_info.h"
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

}  // namespace

Support cuda_routes(const MoeSpec& spec) {
  if (spec.num_zero_experts > 0) return Support::no("zero experts are routed on the host");
  return routing::device_router_supports(spec);
}

void cuda_route(int32_t ordinal, const MoeSpec& spec, const RouteArgs& args) {
  if (args.stream.handle == nullptr) {
    throw Error(ErrorCode::kDevice, {.what = "a call on CUDA needs a stream", .tensor = "stream"});
  }
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

// The route kernel: logits to ids and weights by the values of a RouterSpec, or given ids to their
// weights. It is all of router "topk", and the part that others share with it.
#pragma once

#include "core/device_flow.h"
#include "routing/cuda/route_rule.h"

#include "conclave/dtype.h"
#include "conclave/error.h"
#include "conclave/spec.h"

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::routing {

struct DeviceRouterArgs;

struct DeviceRouteArgs {
  const void* logits = nullptr;  // [T, logits_stride] kF32, kBF16 or kF16: E + Z columns
  DType logits_dtype = DType::kF32;
  int64_t logits_stride = 0;
  int64_t num_tokens = 0;
  const int64_t* live_tokens = nullptr;   // device, or null; later rows get ids -1
  const bool* padding_mask = nullptr;     // [T], or null; false: ids -1, weights 0
  const float* selection_bias = nullptr;  // [E + Z], for RouterSpec::has_selection_bias
  const float* expert_scale = nullptr;    // [E], for has_expert_scale
  const float* global_scale = nullptr;    // [1], for has_global_scale
  const int32_t* given_ids = nullptr;     // [T, k]: recorded choices to be weighed only, or null
  // Appended to topk_ids and topk_weights; k + shared <= kLaneSlots if k is.
  SharedSlots shared = {};
  int32_t* topk_ids = nullptr;        // [T, k + shared] out: expert id; -1: zero expert or none
  float* topk_weights = nullptr;      // [T, k + shared] out
  float* identity = nullptr;          // [T] out: summed weights of zero experts, or null
  int32_t* captured_ids = nullptr;    // [T, k] out: ids as chosen, with zero experts, or null
  float* captured_weights = nullptr;  // [T, k] out, or null
  int64_t captured_ids_stride = 0;    // elements; 0: k
  int64_t captured_weights_stride = 0;
  uint64_t* tokens_without_finite_logit = nullptr;  // device counter to add to; padding does not
                                                    // count
};

namespace device {
struct RouteParams;
}
using RouteKernel = void (*)(device::RouteParams);

// Warps of a block, unless their scratch memory is too much.
inline constexpr int32_t kRouteWarps = 4;

// A spec fixes this much of the launch.
struct DeviceRoutePlan {
  DeviceRouteRule made;   // chooses and weighs
  DeviceRouteRule given;  // weighs DeviceRouteArgs::given_ids
  RouteKernel kernel = nullptr;
  int32_t warps = kRouteWarps;  // per block, one per token
  size_t shared_bytes = 0;

  const DeviceRouteRule& rule_for(const DeviceRouteArgs& args) const {
    return args.given_ids != nullptr ? given : made;
  }
};

// No with the reason beyond E + Z = 1024.
Support device_route_supports(const MoeSpec& spec);
DeviceRoutePlan plan_device_route(const MoeSpec& spec);
// The instance of the kernel for so many columns per lane: up to kLaneSlots slots, and beyond.
RouteKernel route_kernel_of(int32_t columns_a_lane);
RouteKernel wide_route_kernel_of(int32_t columns_a_lane);
// One launch. Scores are formed in double, as on the host: the same logits give the same choices
// unless two scores differ by less than 1e-15 of their size, and weights within 2 ulp.
void device_route(const DeviceRoutePlan& plan, const DeviceRouteArgs& args, CUstream_st* stream);
// The same for a router that overwrites the weights by its own: ids and weights of its arguments.
void choose_by_route(const DeviceRoutePlan& plan, const DeviceRouterArgs& args,
                     CUstream_st* stream);

}  // namespace conclave::inline v0::routing

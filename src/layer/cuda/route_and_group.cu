#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "dispatch/cuda/group_launch.h"
#include "layer/cuda/route_and_group.h"
#include "routing/cuda/route_row.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace conclave::inline v0 {
namespace {

// 128 registers a thread; routing with 16 columns a lane takes about 100.
constexpr int32_t kMaxThreads = 512;
constexpr int32_t kMaxColumnsALane = 16;
// A warp a token in one block. With more blocks the barrier of a cluster costs more than a second
// launch, which overlaps with the first: measured on an H200.
constexpr int64_t kMaxTokens = 8;
constexpr size_t kMaxSharedBytes = size_t{160} * 1024;

template <int kColumns>
__global__ void __launch_bounds__(kMaxThreads, 1)
    route_and_group_kernel(const __grid_constant__ routing::device::RouteParams route,
                           const __grid_constant__ dispatch::device::GroupParams group) {
  extern __shared__ __align__(16) std::byte memory[];
  const auto shared = dispatch::device::carve_group_shared(memory, group.num_local_experts);
  const auto warps = static_cast<int64_t>(blockDim.x / 32);
  const auto warp = static_cast<int64_t>(threadIdx.x / 32);
  auto* scratch = reinterpret_cast<double*>(
      memory + dispatch::group_shared_bytes_aligned(warps, group.num_local_experts));
  dispatch::device::clear_group_shared(shared, group.num_local_experts);
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  for (int64_t token = blockIdx.x + warp * gridDim.x; token < route.args.num_tokens;
       token += gridDim.x * warps) {
    routing::device::route_token<kColumns>(
        route, token, scratch + warp * routing::route_scratch_doubles(route.rule));
  }
  dispatch::device::sync_group(gridDim.x);
  dispatch::device::group_slots(group, shared, blockIdx.x, gridDim.x);
}

using Kernel = void (*)(routing::device::RouteParams, dispatch::device::GroupParams);

Kernel kernel_of(int32_t columns_a_lane) {
  switch (columns_a_lane) {
    case 1:
      return route_and_group_kernel<1>;
    case 2:
      return route_and_group_kernel<2>;
    case 4:
      return route_and_group_kernel<4>;
    case 8:
      return route_and_group_kernel<8>;
    default:
      return route_and_group_kernel<kMaxColumnsALane>;
  }
}

routing::DeviceRouteRule rule_of(const MoeSpec& spec, const routing::DeviceRouteArgs& route) {
  const bool given = route.given_ids != nullptr;
  return routing::device_route_rule(spec,
                                    given ? routing::Choices::kGiven : routing::Choices::kMade);
}

dispatch::DeviceGroupArgs group_of(const MoeSpec& spec, const routing::DeviceRouteArgs& route,
                                   const dispatch::DeviceGroupArgs& group) {
  dispatch::DeviceGroupArgs args = group;
  args.topk_ids = route.topk_ids;
  args.num_tokens = route.num_tokens;
  args.live_tokens = route.live_tokens;
  args.top_k = static_cast<int32_t>(spec.top_k);
  return args;
}

size_t shared_bytes(const routing::DeviceRouteRule& rule, int32_t threads,
                    int64_t num_local_experts) {
  const auto warps = static_cast<size_t>(threads / 32);
  return dispatch::group_shared_bytes_aligned(threads / 32, num_local_experts) +
         warps * static_cast<size_t>(routing::route_scratch_doubles(rule)) * sizeof(double);
}

}  // namespace

dispatch::GroupShape route_and_group_shape(const MoeSpec& spec, int64_t num_tokens,
                                           int64_t num_local_experts) {
  const auto rule = routing::device_route_rule(spec, routing::Choices::kMade);
  const bool fits = num_tokens <= kMaxTokens && num_local_experts <= kMaxThreads &&
                    routing::columns_a_lane(rule) <= kMaxColumnsALane;
  if (!fits) return {.blocks = 0};
  dispatch::GroupShape shape = dispatch::group_shape(num_tokens * spec.top_k, num_local_experts);
  const auto threads = std::max<int64_t>(shape.threads, round_up(num_tokens, 4) * 32);
  shape.threads = static_cast<int32_t>(threads);
  shape.shared_bytes = shared_bytes(rule, shape.threads, num_local_experts);
  if (shape.shared_bytes > kMaxSharedBytes) return {.blocks = 0};
  return shape;
}

GroupedRows device_route_and_group(const MoeSpec& spec, const routing::DeviceRouteArgs& route,
                                   const dispatch::DeviceGroupArgs& group,
                                   const dispatch::GroupShape& shape, CUstream_st* stream) {
  const routing::device::RouteParams params{rule_of(spec, route), route};
  dispatch::GroupLaunch launch = dispatch::prepare_group(group_of(spec, route, group));
  launch.params.block_counts = nullptr;
  dispatch::GroupShape sized = shape;
  sized.shared_bytes = shared_bytes(params.rule, shape.threads, group.num_local_experts);
  const Kernel kernel = kernel_of(routing::columns_a_lane(params.rule));
  dispatch::allow_group_shared(reinterpret_cast<const void*>(kernel), sized);
  cuda::launch("layer.route_and_group", kernel,
               {.blocks = sized.blocks,
                .threads = sized.threads,
                .shared_bytes = sized.shared_bytes,
                .cluster = sized.cluster,
                .stream = stream},
               params, launch.params);
  return launch.rows;
}

GroupedRows device_route_and_group(const MoeSpec& spec, const routing::DeviceRouteArgs& route,
                                   const dispatch::DeviceGroupArgs& group, CUstream_st* stream) {
  const dispatch::GroupShape shape =
      route_and_group_shape(spec, route.num_tokens, group.num_local_experts);
  if (shape.blocks != 0) return device_route_and_group(spec, route, group, shape, stream);
  routing::device_route(spec, route, stream);
  return dispatch::device_group(group_of(spec, route, group), stream);
}

}  // namespace conclave::inline v0

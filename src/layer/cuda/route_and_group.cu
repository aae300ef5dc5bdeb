#include "core/checked.h"
#include "cuda/device/cluster.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "dispatch/cuda/group_launch.h"
#include "dispatch/cuda/group_shape.h"
#include "dispatch/cuda/group_tokens.cuh"
#include "layer/cuda/route_and_group.h"
#include "layer/cuda/route_group_shape.h"
#include "routing/cuda/route_row.cuh"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0 {
namespace {

template <int kColumns>
__global__ void __launch_bounds__(kMaxRouteGroupThreads, 1)
    route_and_group_kernel(const __grid_constant__ routing::device::RouteParams route,
                           const __grid_constant__ dispatch::device::GroupParams group,
                           int32_t block_tokens) {
  extern __shared__ __align__(16) std::byte memory[];
  const auto shared =
      dispatch::device::carve_token_shared(memory, group.num_local_experts, gridDim.x);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  auto* scratch =
      reinterpret_cast<double*>(memory + token_shared_bytes(group.num_local_experts, gridDim.x)) +
      warp * routing::route_scratch_doubles(route.rule);
  dispatch::device::clear_token_shared(shared, group.num_local_experts, gridDim.x);
  dispatch::device::sync_group(gridDim.x);
  routing::device::touch_parameters(route);
  dispatch::device::touch_parameters(group);
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t token = int64_t{blockIdx.x} * block_tokens + warp;
  const uint32_t bit = warp < block_tokens ? 1U << warp : 0U;
  const bool routes = bit != 0 && token < route.args.num_tokens;
  routing::device::TokenChoice choice;
  int32_t expert = -1;
  if (routes) {
    choice = routing::device::choose_token<kColumns>(route, token, scratch);
    expert =
        dispatch::device::add_choice(group, shared, bit, routing::device::slot_id(route, choice));
  }
  __syncthreads();
  // Nothing has been stored to global memory yet, so the barrier waits for a few words only; the
  // weights are computed meanwhile.
  if (gridDim.x > 1) {
    dispatch::device::tell_choices(group, shared);
    __syncwarp();
    cuda::device::cluster_arrive();
  }
  if (routes) routing::device::weigh_token(route, token, choice);
  __syncwarp();
  if (gridDim.x > 1) cuda::device::cluster_wait();
  dispatch::device::place_choices(group, shared, blockIdx.x, gridDim.x);
  __syncwarp();
  const int32_t slots = route.rule.top_k + route.args.shared.count;
  const auto slot = static_cast<int32_t>(token * slots) + routing::device::lane_id();
  if (routes && routing::device::lane_id() < slots) {
    dispatch::device::store_choice(group, shared, bit, expert, slot);
  }
}

using Kernel = void (*)(routing::device::RouteParams, dispatch::device::GroupParams, int32_t);

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
      return route_and_group_kernel<kMaxRouteGroupColumnsALane>;
  }
}

dispatch::DeviceGroupArgs group_of(const routing::DeviceRoutePlan& plan,
                                   const routing::DeviceRouteArgs& route,
                                   const dispatch::DeviceGroupArgs& group) {
  dispatch::DeviceGroupArgs args = group;
  args.topk_ids = route.topk_ids;
  args.num_tokens = route.num_tokens;
  args.live_tokens = route.live_tokens;
  args.top_k = plan.made.top_k + route.shared.count;
  return args;
}

}  // namespace

int32_t find_cluster_blocks() {
  // Whether a cluster fits depends on the multiprocessors that lie together, since a block takes
  // one of them with any number of columns.
  const auto* kernel = reinterpret_cast<const void*>(kernel_of(kMaxRouteGroupColumnsALane));
  cuda::allow_shared_bytes(kernel, kMaxRouteGroupSharedBytes);
  cuda::allow_large_cluster(kernel);
  const bool holds = cuda::holds_cluster(kernel, {.blocks = kMaxRouteGroupBlocks,
                                                  .threads = kMaxRouteGroupThreads,
                                                  .shared_bytes = kMaxRouteGroupSharedBytes,
                                                  .cluster = kMaxRouteGroupBlocks});
  return holds ? static_cast<int32_t>(kMaxRouteGroupBlocks) : cuda::kPortableCluster;
}

void prepare_route_and_group(const routing::DeviceRoutePlan& plan,
                             const dispatch::GroupShape& shape) {
  const auto* kernel = reinterpret_cast<const void*>(kernel_of(routing::columns_a_lane(plan.made)));
  const bool is_large = shape.cluster > cuda::kPortableCluster;
  if (is_large) cuda::allow_large_cluster(kernel);
  // The limit is the kernel's, for all layers, and so must not depend on one of them.
  if (is_large || shape.shared_bytes > dispatch::kDefaultSharedBytes) {
    cuda::allow_shared_bytes(kernel, kMaxRouteGroupSharedBytes);
  }
}

GroupedRows device_route_and_group(const routing::DeviceRoutePlan& plan,
                                   const routing::DeviceRouteArgs& route,
                                   const dispatch::DeviceGroupArgs& group, CUstream_st* stream) {
  const dispatch::GroupShape& shape = group.launches.routed;
  if (shape.blocks == 0 || route.given_ids != nullptr) {
    routing::device_route(plan, route, stream);
    return dispatch::device_group(group_of(plan, route, group), stream);
  }
  const auto params = routing::device::route_params(plan, route);
  dispatch::GroupLaunch launch = dispatch::prepare_group(group_of(plan, route, group));
  cuda::launch("layer.route_and_group", kernel_of(routing::columns_a_lane(params.rule)),
               {.blocks = shape.blocks,
                .threads = shape.threads,
                .shared_bytes = shape.shared_bytes,
                .cluster = shape.cluster,
                .stream = stream},
               params, launch.params,
               static_cast<int32_t>(ceil_div(route.num_tokens, int64_t{shape.blocks})));
  return launch.rows;
}

}  // namespace conclave::inline v0

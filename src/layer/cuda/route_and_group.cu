#include "core/checked.h"
#include "cuda/device/cluster.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "dispatch/cuda/group_launch.h"
#include "dispatch/cuda/group_tokens.cuh"
#include "layer/cuda/route_and_group.h"
#include "routing/cuda/route_row.cuh"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace conclave::inline v0 {
namespace {

constexpr size_t kMaxSharedBytes = size_t{160} * 1024;
constexpr int32_t kMaxColumnsALane = 16;
// Measured on an H200: more tokens per block than this, and the barrier of a further block pays.
constexpr int64_t kBlockTokens = 8;
constexpr int64_t kMaxBlocks = 16;

// One warp per token, so that a block's tokens have one bit each in a word. More tokens take longer
// than a launch that spreads them over the GPU.
constexpr int64_t kMaxBlockTokens = 16;
constexpr int32_t kMaxThreads = 512;

// Rounded up to 16 bytes, so that doubles may follow.
__host__ __device__ constexpr size_t token_shared_bytes(int64_t num_local_experts, int64_t blocks) {
  const auto words = static_cast<size_t>(num_local_experts * (blocks + 1));
  return (words * sizeof(uint32_t) + 15) / 16 * 16;
}

template <int kColumns>
__global__ void __launch_bounds__(kMaxThreads, 1)
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
      return route_and_group_kernel<kMaxColumnsALane>;
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

size_t shared_bytes(const routing::DeviceRouteRule& rule, const dispatch::GroupShape& shape,
                    int64_t num_local_experts) {
  const auto warps = static_cast<size_t>(shape.threads / 32);
  return token_shared_bytes(num_local_experts, shape.blocks) +
         warps * static_cast<size_t>(routing::route_scratch_doubles(rule)) * sizeof(double);
}

// Not every device has room for a cluster of more than eight blocks. The driver is asked once per
// device and kernel, for the largest shape, since it takes longer than a launch and allocates.
bool device_holds(const routing::DeviceRoutePlan& plan, const dispatch::GroupShape& shape) {
  if (shape.cluster <= cuda::kPortableCluster) return true;
  enum class Answer : int8_t { kUnknown, kNo, kYes };
  constexpr int kDevices = 64;
  static std::array<std::array<std::atomic<Answer>, kMaxColumnsALane + 1>, kDevices> answers;
  int device = 0;
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= kDevices) return false;
  const int32_t columns = routing::columns_a_lane(plan.made);
  std::atomic<Answer>& answer = answers[static_cast<size_t>(device)][static_cast<size_t>(columns)];
  if (answer.load(std::memory_order_relaxed) == Answer::kUnknown) {
    const auto* kernel = reinterpret_cast<const void*>(kernel_of(columns));
    cuda::allow_shared_bytes(kernel, kMaxSharedBytes);
    const bool holds = cuda::allow_large_cluster(kernel, {.blocks = kMaxBlocks,
                                                          .threads = kMaxThreads,
                                                          .shared_bytes = kMaxSharedBytes,
                                                          .cluster = kMaxBlocks});
    answer.store(holds ? Answer::kYes : Answer::kNo, std::memory_order_relaxed);
  }
  return answer.load(std::memory_order_relaxed) == Answer::kYes;
}

}  // namespace

dispatch::GroupShape route_and_group_shape(const routing::DeviceRoutePlan& plan, int64_t num_tokens,
                                           int64_t num_local_experts) {
  constexpr dispatch::GroupShape kNone{.blocks = 0};
  const int32_t columns = routing::columns_a_lane(plan.made);
  if (columns > kMaxColumnsALane) return kNone;
  dispatch::GroupShape shape;
  while (shape.blocks < kMaxBlocks && num_tokens > shape.blocks * kBlockTokens) shape.blocks *= 2;
  const int64_t tokens = ceil_div(num_tokens, shape.blocks);
  if (tokens > kMaxBlockTokens || num_local_experts > kMaxThreads) return kNone;
  shape.cluster = shape.blocks;
  shape.threads = static_cast<int32_t>(std::max(tokens, ceil_div(num_local_experts, 32)) * 32);
  shape.shared_bytes = shared_bytes(plan.made, shape, num_local_experts);
  return shape.shared_bytes <= kMaxSharedBytes ? shape : kNone;
}

GroupedRows device_route_and_group(const routing::DeviceRoutePlan& plan,
                                   const routing::DeviceRouteArgs& route,
                                   const dispatch::DeviceGroupArgs& group,
                                   const dispatch::GroupShape& shape, CUstream_st* stream) {
  const auto params = routing::device::route_params(plan, route);
  dispatch::GroupLaunch launch = dispatch::prepare_group(group_of(plan, route, group));
  const Kernel kernel = kernel_of(routing::columns_a_lane(params.rule));
  dispatch::GroupShape sized = shape;
  sized.shared_bytes = shared_bytes(params.rule, shape, group.num_local_experts);
  dispatch::allow_group_shared(reinterpret_cast<const void*>(kernel), sized);
  cuda::launch("layer.route_and_group", kernel,
               {.blocks = shape.blocks,
                .threads = shape.threads,
                .shared_bytes = sized.shared_bytes,
                .cluster = shape.cluster,
                .stream = stream},
               params, launch.params,
               static_cast<int32_t>(ceil_div(route.num_tokens, int64_t{shape.blocks})));
  return launch.rows;
}

GroupedRows device_route_and_group(const routing::DeviceRoutePlan& plan,
                                   const routing::DeviceRouteArgs& route,
                                   const dispatch::DeviceGroupArgs& group, CUstream_st* stream) {
  const dispatch::GroupShape shape =
      route_and_group_shape(plan, route.num_tokens, group.num_local_experts);
  // Given ids may name an expert twice, which the single launch cannot group.
  if (shape.blocks != 0 && route.given_ids == nullptr && device_holds(plan, shape)) {
    return device_route_and_group(plan, route, group, shape, stream);
  }
  routing::device_route(plan, route, stream);
  return dispatch::device_group(group_of(plan, route, group), stream);
}

}  // namespace conclave::inline v0

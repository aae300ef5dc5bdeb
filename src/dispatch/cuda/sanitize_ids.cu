#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "dispatch/cuda/group_launch.h"
#include "dispatch/cuda/group_shape.h"
#include "dispatch/cuda/sanitize_ids.h"
#include "dispatch/cuda/sanitize_token.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::dispatch {
namespace {

constexpr int32_t kWarps = 4;

__global__ void __launch_bounds__(kWarps * 32)
    sanitize_kernel(const __grid_constant__ DeviceSanitizeArgs args) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t step = int64_t{gridDim.x} * kWarps;
  for (int64_t token = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32; token < args.num_tokens;
       token += step) {
    device::sanitize_token(args, token);
  }
}

__global__ void __launch_bounds__(1024, 1)
    sanitize_and_group_kernel(const __grid_constant__ DeviceSanitizeArgs args,
                              const __grid_constant__ device::GroupParams group) {
  extern __shared__ __align__(16) std::byte memory[];
  const device::GroupShared shared = device::carve_group_shared(memory, group.num_local_experts);
  device::clear_group_shared(shared, group.num_local_experts);
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t warps = blockDim.x / 32;
  for (int64_t token = blockIdx.x * warps + threadIdx.x / 32; token < args.num_tokens;
       token += gridDim.x * warps) {
    device::sanitize_token(args, token);
  }
  device::sync_group(gridDim.x);
  device::group_slots<device::Ids::kGiven>(group, shared, blockIdx.x, gridDim.x);
}

}  // namespace

void device_sanitize_ids(const DeviceSanitizeArgs& args, CUstream_st* stream) {
  if (args.num_tokens == 0) return;
  constexpr int64_t kMaxBlocks = int64_t{1} << 30;
  cuda::launch("dispatch.sanitize", sanitize_kernel,
               {.blocks = std::min(kMaxBlocks, ceil_div(args.num_tokens, kWarps)),
                .threads = kWarps * 32,
                .stream = stream},
               args);
}

void prepare_sanitize_and_group(const GroupShape& shape) {
  allow_group_shared(reinterpret_cast<const void*>(sanitize_and_group_kernel), shape);
}

GroupedRows device_sanitize_and_group(const DeviceSanitizeArgs& sanitize,
                                      const DeviceGroupArgs& group, CUstream_st* stream) {
  DeviceGroupArgs args = group;
  args.topk_ids = sanitize.topk_ids;
  args.num_tokens = sanitize.num_tokens;
  args.live_tokens = sanitize.live_tokens;
  args.top_k = sanitize.top_k + sanitize.shared.count;
  const GroupShape& shape = args.launches.shape;
  if (!args.launches.checks_ids) {
    device_sanitize_ids(sanitize, stream);
    return device_group(args, stream);
  }
  GroupLaunch launch = prepare_group(args);
  launch.params.block_counts = nullptr;
  cuda::launch("dispatch.sanitize_and_group", sanitize_and_group_kernel,
               {.blocks = shape.blocks,
                .threads = shape.threads,
                .shared_bytes = shape.shared_bytes,
                .cluster = shape.cluster,
                .stream = stream},
               sanitize, launch.params);
  return launch.rows;
}

}  // namespace conclave::inline v0::dispatch

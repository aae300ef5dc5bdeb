#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "dispatch/cuda/group_launch.h"
#include "dispatch/cuda/group_shape.h"
#include "dispatch/cuda/group_slots.cuh"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace conclave::inline v0::dispatch {
namespace {

template <device::Ids kIds>
__global__ void __launch_bounds__(1024, 1)
    group_kernel(const __grid_constant__ device::GroupParams params) {
  extern __shared__ __align__(16) std::byte memory[];
  const device::GroupShared shared = device::carve_group_shared(memory, params.num_local_experts);
  device::clear_group_shared(shared, params.num_local_experts);
  __syncthreads();
  device::touch_parameters(params);
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  device::group_slots<kIds>(params, shared, blockIdx.x, gridDim.x);
}

template <device::Ids kIds>
__global__ void __launch_bounds__(1024, 1)
    count_kernel(const __grid_constant__ device::GroupParams params) {
  __shared__ uint32_t counts[kMaxGroupExperts];
  for (uint32_t e = threadIdx.x; e < kMaxGroupExperts; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  device::count_block<kIds>(params, counts);
}

template <device::Ids kIds>
GroupedRows run_group(const DeviceGroupArgs& args, const GroupShape& shape, CUstream_st* stream) {
  GroupLaunch group = prepare_group(args);
  if (shape.counts_first()) {
    cuda::launch("dispatch.count", count_kernel<kIds>,
                 {.blocks = shape.blocks, .threads = shape.threads, .stream = stream},
                 group.params);
  } else {
    group.params.block_counts = nullptr;
  }
  cuda::launch("dispatch.group", group_kernel<kIds>,
               {.blocks = shape.blocks,
                .threads = shape.threads,
                .shared_bytes = shape.shared_bytes,
                .cluster = shape.cluster,
                .stream = stream},
               group.params);
  return group.rows;
}

}  // namespace

GroupLaunch prepare_group(const DeviceGroupArgs& args) {
  const int32_t skewed_tile = args.skewed_tile_tokens;
  const int32_t least_tile =
      skewed_tile == 0 ? args.tile_tokens : std::min(args.tile_tokens, skewed_tile);
  const GroupLayout layout =
      group_layout(args.num_tokens, args.top_k, args.num_local_experts, least_tile);
  constexpr int64_t kMostTiles = std::numeric_limits<uint32_t>::max();
  auto* base = static_cast<std::byte*>(args.workspace);
  const auto at = [base](size_t offset) { return static_cast<void*>(base + offset); };
  GroupLaunch launch;
  launch.params = {.topk_ids = args.topk_ids,
                   .wide_ids = args.wide_ids,
                   .narrow_ids = args.narrow_ids,
                   .skipped_ids = reinterpret_cast<unsigned long long*>(args.skipped_ids),
                   .num_tokens = args.num_tokens,
                   .live_tokens = args.live_tokens,
                   .local_expert = args.local_expert,
                   .expert_load = reinterpret_cast<unsigned long long*>(args.expert_load),
                   .num_counted = args.num_counted == 0 ? args.num_experts : args.num_counted,
                   .top_k = args.top_k,
                   .num_experts = args.num_experts,
                   .num_local_experts = args.num_local_experts,
                   .tile_tokens = args.tile_tokens,
                   .tile_shift = log2_or_minus_one(args.tile_tokens),
                   .skewed_tile_tokens = skewed_tile,
                   .skewed_tile_shift = log2_or_minus_one(skewed_tile),
                   .skewed_from = static_cast<uint32_t>(std::min(args.skewed_from, kMostTiles)),
                   .expert_bits = bits_below(args.num_local_experts),
                   .expert_begin = static_cast<int32_t*>(at(layout.expert_begin)),
                   .num_tiles = static_cast<int32_t*>(at(layout.num_tiles)),
                   .row_slot = static_cast<int32_t*>(at(layout.row_slot)),
                   .slot_row = static_cast<int32_t*>(at(layout.slot_row)),
                   .tiles = static_cast<TokenTile*>(at(layout.tiles)),
                   .block_counts = static_cast<uint32_t*>(at(layout.block_counts))};
  launch.rows = {.expert_begin = launch.params.expert_begin,
                 .row_slot = launch.params.row_slot,
                 .slot_row = launch.params.slot_row,
                 .tiles = launch.params.tiles,
                 .num_tiles = launch.params.num_tiles,
                 .max_rows = layout.max_rows,
                 .max_tiles = layout.max_tiles,
                 .tile_tokens = args.tile_tokens,
                 .top_k = args.top_k,
                 .num_skewed_tiles = skewed_tile == 0 ? nullptr : launch.params.num_tiles + 1,
                 .skewed_tile_tokens = skewed_tile};
  return launch;
}

void allow_group_shared(const void* kernel, const GroupShape& shape) {
  constexpr size_t kMostBytes = group_shared_bytes(kGroupMaxThreads, kMaxGroupExperts);
  if (shape.shared_bytes > kDefaultSharedBytes) cuda::allow_shared_bytes(kernel, kMostBytes);
}

void prepare_group_kernels(const GroupShape& shape) {
  allow_group_shared(reinterpret_cast<const void*>(group_kernel<device::Ids::kGiven>), shape);
  allow_group_shared(reinterpret_cast<const void*>(group_kernel<device::Ids::kPlain>), shape);
  prepare_sanitize_and_group(shape);
}

GroupedRows device_group(const DeviceGroupArgs& args, CUstream_st* stream) {
  const GroupShape& shape = args.launches.shape;
  const bool given = args.wide_ids != nullptr || args.narrow_ids != nullptr ||
                     args.skipped_ids != nullptr || args.expert_load != nullptr;
  return given ? run_group<device::Ids::kGiven>(args, shape, stream)
               : run_group<device::Ids::kPlain>(args, shape, stream);
}

}  // namespace conclave::inline v0::dispatch

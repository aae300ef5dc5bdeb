#include "routing/cuda/bans.cuh"
#include "routing/cuda/limits.h"
#include "routing/cuda/rows.cuh"

#include <cstdint>

namespace conclave::inline v0::routing {
namespace {

using device::lane_id;

// A lane writes only what it has read itself, so that both may be the same memory.
__global__ void __launch_bounds__(device::kRowThreads)
    mask_kernel(const __grid_constant__ DeviceMaskArgs args) {
  device::for_each_token(args.router.num_tokens, [&](int64_t token) {
    for (int64_t column = lane_id(); column < args.num_logits; column += 32) {
      const bool out =
          column < args.num_columns && device::is_banned(args.router.banned, token, column);
      const float logit = device::load_logit(args.router, token, column);
      args.to[token * args.num_logits + column] = out ? -CUDART_INF_F : logit;
    }
  });
}

__global__ void __launch_bounds__(device::kRowThreads)
    keep_first_kernel(const int32_t* ids, int64_t num_tokens, int32_t slots, int32_t few,
                      int32_t* to) {
  device::for_each_token(num_tokens, [&](int64_t token) {
    for (int32_t slot = lane_id(); slot < few; slot += 32) {
      to[token * few + slot] = ids[token * slots + slot];
    }
  });
}

// By a whole warp: how many columns the caller's own flags leave.
__device__ int64_t columns_left(const DeviceSlotLimits& args, int64_t token) {
  const DeviceBans own{.rows = args.banned.rows, .stride = args.banned.stride};
  int64_t left = 0;
  for (int64_t first = 0; first < args.num_columns; first += 32) {
    const int64_t column = first + lane_id();
    const bool stays = column < args.num_columns && !device::is_banned(own, token, column);
    left += __popc(__ballot_sync(device::kFullWarp, stays));
  }
  return left;
}

__device__ bool counts(const DeviceSlotLimits& args, int64_t token) {
  return (args.live_tokens == nullptr || token < *args.live_tokens) &&
         (args.padding_mask == nullptr || args.padding_mask[token]);
}

__global__ void __launch_bounds__(device::kRowThreads)
    limit_slots_kernel(const __grid_constant__ DeviceSlotLimits args) {
  device::for_each_token(args.num_tokens, [&](int64_t token) {
    for (int32_t slot = lane_id(); slot < args.slots; slot += 32) {
      int32_t id = -1;
      float weight = 0;
      if (slot < args.few) {
        id = args.ids[token * args.from_slots + slot];
        weight = args.weights[token * args.from_slots + slot];
        const bool named = id >= 0 && id < args.num_columns;
        if (named && device::is_banned(args.banned, token, id)) {
          id = -1;
          weight = 0;
        }
        if (args.drops_weightless && weight == 0) id = -1;
      }
      args.to_ids[token * args.slots + slot] = id;
      args.to_weights[token * args.slots + slot] = weight;
    }
    if (args.missing_choices == nullptr || !counts(args, token)) return;
    const int64_t missing = args.few - columns_left(args, token);
    if (missing <= 0 || lane_id() != 0) return;
    atomicAdd(reinterpret_cast<unsigned long long*>(args.missing_choices),
              static_cast<unsigned long long>(missing));
  });
}

}  // namespace

void mask_logits(const DeviceMaskArgs& args, CUstream_st* stream) {
  const int64_t tokens = args.router.num_tokens;
  if (tokens == 0) return;
  cuda::launch("routing.mask", mask_kernel, device::warps_of(tokens, stream), args);
}

void keep_first_slots(const int32_t* ids, int64_t num_tokens, int32_t slots, int32_t few,
                      int32_t* to, CUstream_st* stream) {
  if (num_tokens == 0) return;
  cuda::launch("routing.keep_first", keep_first_kernel, device::warps_of(num_tokens, stream), ids,
               num_tokens, slots, few, to);
}

void limit_slots(const DeviceSlotLimits& args, CUstream_st* stream) {
  if (args.num_tokens == 0) return;
  cuda::launch("routing.limit_slots", limit_slots_kernel, device::warps_of(args.num_tokens, stream),
               args);
}

}  // namespace conclave::inline v0::routing

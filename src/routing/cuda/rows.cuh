// Steps that routers on the device share: one warp visits a token. The host's are in
// routing/rows.h.
#pragma once

#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/vector16.cuh"
#include "cuda/launch.h"
#include "routing/cuda/device_router.h"
#include "routing/cuda/score.cuh"

#include <algorithm>
#include <cstdint>

namespace conclave::inline v0::routing::device {

inline constexpr int32_t kRowWarps = 4;
inline constexpr int32_t kRowThreads = kRowWarps * 32;

// False for padding and for tokens beyond the live ones.
__device__ __forceinline__ bool counts(const DeviceRouterArgs& args, int64_t token) {
  return (args.live_tokens == nullptr || token < *args.live_tokens) &&
         (args.padding_mask == nullptr || args.padding_mask[token]);
}

__device__ __forceinline__ void add_one(uint64_t* counter) {
  if (counter != nullptr) atomicAdd(reinterpret_cast<unsigned long long*>(counter), 1ULL);
}

// Reads NaN as -inf.
__device__ __forceinline__ float load_logit(const DeviceRouterArgs& args, int64_t token,
                                            int64_t column) {
  const int64_t at = token * args.logits_stride + column;
  float logit = 0;
  switch (args.logits_dtype) {
    case DType::kF32:
      logit = static_cast<const float*>(args.logits)[at];
      break;
    case DType::kF16:
      logit = cuda::device::widen(static_cast<const __half*>(args.logits)[at]);
      break;
    default:
      logit = cuda::device::widen(static_cast<const __nv_bfloat16*>(args.logits)[at]);
  }
  return logit > -CUDART_INF_F ? logit : -CUDART_INF_F;
}

__device__ __forceinline__ int64_t load_index(const void* data, DType dtype, int64_t at) {
  if (dtype == DType::kI64) return static_cast<const int64_t*>(data)[at];
  return static_cast<const int32_t*>(data)[at];
}

// Visits the tokens of the grid, one warp per token.
template <class Visit>
__device__ void for_each_token(int64_t num_tokens, const Visit& visit) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t step = int64_t{gridDim.x} * (blockDim.x / 32);
  const int64_t first = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  for (int64_t token = first; token < num_tokens; token += step) visit(token);
}

// One warp per token.
inline cuda::LaunchShape warps_of(int64_t tokens, CUstream_st* stream) {
  constexpr int64_t kMaxBlocks = int64_t{1} << 30;
  return {.blocks = std::min(kMaxBlocks, ceil_div(tokens, int64_t{kRowWarps})),
          .threads = kRowThreads,
          .stream = stream};
}

}  // namespace conclave::inline v0::routing::device

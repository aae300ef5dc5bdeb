#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/vector16.cuh"
#include "cuda/launch.h"
#include "dispatch/cuda/sum_rows.h"

#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0::dispatch {
namespace {

constexpr int kThreads = 256;
// Units of eight columns per thread, all requested before the first is rounded.
constexpr int kUnits = 4;
constexpr int kColumns = 8;

struct RoundParams {
  const float* sums = nullptr;
  int64_t sums_stride = 0;
  int64_t num_tokens = 0;
  const int64_t* live_tokens = nullptr;
  int64_t columns = 0;
  int64_t units_per_row = 0;
  float scale = 1;
  void* out = nullptr;
  int64_t out_stride = 0;
  bool aligned = false;  // both kinds of rows begin at multiples of 16 bytes
};

__global__ void __launch_bounds__(kThreads) clear_kernel(float4* sums, int64_t quads) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t first = int64_t{blockIdx.x} * kThreads * kUnits + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int64_t at = first + i * kThreads;
    if (at < quads) sums[at] = make_float4(0, 0, 0, 0);
  }
}

// Stores columns [column, column + 8) of a row, fewer at its end.
template <class Out>
__device__ __forceinline__ void store(const RoundParams& params, int64_t token, int64_t column,
                                      const float (&values)[kColumns]) {
  Out* to = static_cast<Out*>(params.out) + token * params.out_stride + column;
  if (params.aligned && column + kColumns <= params.columns) {
    cuda::device::store_8(values, to);
    return;
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (column + i < params.columns) to[i] = cuda::device::narrow<Out>(values[i]);
  }
}

__device__ __forceinline__ void load(const RoundParams& params, int64_t token, int64_t column,
                                     float (&values)[kColumns]) {
  const float* from = params.sums + token * params.sums_stride + column;
  if (column + kColumns <= params.columns) {
    cuda::device::load_8(from, values);
    return;
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) values[i] = column + i < params.columns ? from[i] : 0.0F;
}

template <class Out>
__global__ void __launch_bounds__(kThreads)
    round_kernel(const __grid_constant__ RoundParams params) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  int64_t live = params.num_tokens;
  if (params.live_tokens != nullptr) live = min(live, *params.live_tokens);
  const int64_t units = live * params.units_per_row;
  const int64_t first = int64_t{blockIdx.x} * kThreads * kUnits + threadIdx.x;
  float values[kUnits][kColumns];
  int64_t tokens[kUnits];
  int64_t columns[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int64_t unit = first + i * kThreads;
    tokens[i] = unit / params.units_per_row;
    columns[i] = (unit - tokens[i] * params.units_per_row) * kColumns;
    if (unit < units) load(params, tokens[i], columns[i], values[i]);
  }
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    if (first + i * kThreads >= units) break;
#pragma unroll
    for (float& value : values[i]) value = __fmul_rn(value, params.scale);
    store<Out>(params, tokens[i], columns[i], values[i]);
  }
}

auto round_kernel_for(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return &round_kernel<float>;
    case DType::kF16:
      return &round_kernel<__half>;
    default:
      return &round_kernel<__nv_bfloat16>;
  }
}

}  // namespace

void clear_sums(float* sums, int64_t count, CUstream_st* stream) {
  if (count == 0) return;
  cuda::launch("dispatch.clear_sums", &clear_kernel,
               {.blocks = ceil_div(count / 4, int64_t{kThreads} * kUnits),
                .threads = kThreads,
                .stream = stream},
               reinterpret_cast<float4*>(sums), count / 4);
}

void round_sums(const DeviceCombineArgs& args, CUstream_st* stream) {
  if (args.num_tokens == 0 || args.hidden_size == 0) return;
  const int64_t out_bytes = args.out_stride * byte_size(args.out_dtype);
  const RoundParams params{
      .sums = args.routed_rows,
      .sums_stride = args.routed_row_stride,
      .num_tokens = args.num_tokens,
      .live_tokens = args.live_tokens,
      .columns = args.hidden_size,
      .units_per_row = ceil_div(args.hidden_size, int64_t{kColumns}),
      .scale = args.output_scale,
      .out = args.out,
      .out_stride = args.out_stride,
      .aligned = reinterpret_cast<uintptr_t>(args.out) % 16 == 0 && out_bytes % 16 == 0};
  const int64_t units = args.num_tokens * params.units_per_row;
  cuda::launch("dispatch.round_sums", round_kernel_for(args.out_dtype),
               {.blocks = ceil_div(units, int64_t{kThreads} * kUnits),
                .threads = kThreads,
                .stream = stream},
               params);
}

}  // namespace conclave::inline v0::dispatch

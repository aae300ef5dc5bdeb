#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "layer/cuda/prepare_rows.h"

#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0 {
namespace {

constexpr int kThreads = 256;

__device__ float widen(float value) { return value; }
__device__ float widen(__half value) { return __half2float(value); }
__device__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__device__ T narrow(float value);
template <>
__device__ float narrow<float>(float value) {
  return value;
}
template <>
__device__ __half narrow<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __nv_bfloat16 narrow<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    convert_kernel(const From* rows, int64_t row_stride, int64_t num_rows, int64_t columns, To* out,
                   int64_t out_stride) {
  // The rows may be what an earlier kernel writes.
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x; item < num_rows * columns;
       item += step) {
    const int64_t row = item / columns;
    const int64_t column = item % columns;
    out[row * out_stride + column] = narrow<To>(widen(rows[row * row_stride + column]));
  }
}

__global__ void chunk_live_kernel(const int64_t* live, int64_t begin, int64_t count, int64_t* out) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t rest = *live - begin;
  *out = rest < 0 ? 0 : (rest < count ? rest : count);
}

__global__ void __launch_bounds__(kThreads) sigmoid_kernel(float* values, int64_t count) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index < count) values[index] = 1.0F / (1.0F + expf(-values[index]));
}

template <class From, class To>
void launch_convert(const ConvertRows& args, CUstream_st* stream) {
  constexpr int64_t kMostBlocks = 2048;
  const int64_t wanted = (args.num_rows * args.columns + kThreads - 1) / kThreads;
  cuda::launch("layer.convert_rows", convert_kernel<From, To>,
               {.blocks = std::clamp<int64_t>(wanted, 1, kMostBlocks),
                .threads = kThreads,
                .stream = stream},
               static_cast<const From*>(args.rows), args.row_stride, args.num_rows, args.columns,
               static_cast<To*>(args.out), args.out_stride);
}

template <class From>
void convert_from(const ConvertRows& args, CUstream_st* stream) {
  switch (args.out_dtype) {
    case DType::kF32:
      return launch_convert<From, float>(args, stream);
    case DType::kF16:
      return launch_convert<From, __half>(args, stream);
    default:
      return launch_convert<From, __nv_bfloat16>(args, stream);
  }
}

}  // namespace

void convert_rows(const ConvertRows& args, CUstream_st* stream) {
  if (args.num_rows == 0) return;
  switch (args.dtype) {
    case DType::kF32:
      return convert_from<float>(args, stream);
    case DType::kF16:
      return convert_from<__half>(args, stream);
    default:
      return convert_from<__nv_bfloat16>(args, stream);
  }
}

void chunk_live_tokens(const int64_t* live, int64_t begin, int64_t count, int64_t* out,
                       CUstream_st* stream) {
  cuda::launch("layer.chunk_live_tokens", chunk_live_kernel, {.threads = 1, .stream = stream}, live,
               begin, count, out);
}

void sigmoid_in_place(float* values, int64_t count, CUstream_st* stream) {
  if (count == 0) return;
  cuda::launch("layer.sigmoid", sigmoid_kernel,
               {.blocks = (count + kThreads - 1) / kThreads, .threads = kThreads, .stream = stream},
               values, count);
}

}  // namespace conclave::inline v0

#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "layer/stages/cuda/prepare_rows.h"

#include "conclave/placement.h"

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

// `weights` holds one weight per row of `out`, or is null; `copies` rows are made of each input
// row.
template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    convert_kernel(const From* rows, int64_t row_stride, int64_t num_rows, int64_t columns, To* out,
                   int64_t out_stride, const float* weights, int64_t copies) {
  // An earlier kernel may still be writing the rows.
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x; item < num_rows * columns;
       item += step) {
    const int64_t row = item / columns;
    const int64_t column = item % columns;
    const float value = widen(rows[row / copies * row_stride + column]);
    out[row * out_stride + column] =
        narrow<To>(weights == nullptr ? value : __fmul_rn(value, weights[row]));
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

// One block per row.
__global__ void __launch_bounds__(kThreads)
    rms_norm_kernel(float* rows, int64_t columns, const float* weight, double epsilon) {
  __shared__ double partial[kThreads];
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  float* const row = rows + blockIdx.x * columns;
  double squares = 0;
  for (int64_t c = threadIdx.x; c < columns; c += kThreads) {
    squares += static_cast<double>(row[c]) * static_cast<double>(row[c]);
  }
  partial[threadIdx.x] = squares;
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }
  const auto factor =
      static_cast<float>(1.0 / sqrt(partial[0] / static_cast<double>(columns) + epsilon));
  for (int64_t c = threadIdx.x; c < columns; c += kThreads) row[c] = row[c] * factor * weight[c];
}

__global__ void __launch_bounds__(kThreads)
    mix_kernel(const float* logits, int64_t num_tokens, float* routed, float* shared) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (token >= num_tokens) return;
  // A softmax over two is a sigmoid of their difference.
  const float difference = logits[2 * token] - logits[2 * token + 1];
  routed[token] = 1.0F / (1.0F + expf(-difference));
  shared[token] = 1.0F / (1.0F + expf(difference));
}

__global__ void __launch_bounds__(kThreads)
    replicas_kernel(const __grid_constant__ ChooseReplicas args) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t slot = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (slot >= args.num_tokens * args.top_k) return;
  const int64_t token = slot / args.top_k;
  const int32_t id = args.ids[slot];
  int32_t physical = -1;
  if (id >= 0) {
    const auto count = static_cast<uint32_t>(args.first[id + 1] - args.first[id]);
    const uint32_t hash = replica_hash(args.first_token + token);
    if (count > 0) physical = args.replicas[args.first[id] + static_cast<int32_t>(hash % count)];
    const bool live = args.live_tokens == nullptr || token < *args.live_tokens;
    if (live && args.expert_load != nullptr) {
      atomicAdd(reinterpret_cast<unsigned long long*>(args.expert_load + id), 1ULL);
    }
  }
  args.physical[slot] = physical;
}

int64_t blocks_of(int64_t threads) { return (threads + kThreads - 1) / kThreads; }

template <class From, class To>
void launch_convert(const ConvertRows& args, const float* weights, int64_t copies,
                    CUstream_st* stream) {
  constexpr int64_t kMostBlocks = 2048;
  const int64_t wanted = (args.num_rows * args.columns + kThreads - 1) / kThreads;
  cuda::launch("layer.convert_rows", convert_kernel<From, To>,
               {.blocks = std::clamp<int64_t>(wanted, 1, kMostBlocks),
                .threads = kThreads,
                .stream = stream},
               static_cast<const From*>(args.rows), args.row_stride, args.num_rows, args.columns,
               static_cast<To*>(args.out), args.out_stride, weights, copies);
}

template <class From>
void convert_from(const ConvertRows& args, const float* weights, int64_t copies,
                  CUstream_st* stream) {
  switch (args.out_dtype) {
    case DType::kF32:
      return launch_convert<From, float>(args, weights, copies, stream);
    case DType::kF16:
      return launch_convert<From, __half>(args, weights, copies, stream);
    default:
      return launch_convert<From, __nv_bfloat16>(args, weights, copies, stream);
  }
}

}  // namespace

void weigh_rows(const ConvertRows& args, const float* weights, int64_t top_k, CUstream_st* stream) {
  if (args.num_rows == 0) return;
  switch (args.dtype) {
    case DType::kF32:
      return convert_from<float>(args, weights, top_k, stream);
    case DType::kF16:
      return convert_from<__half>(args, weights, top_k, stream);
    default:
      return convert_from<__nv_bfloat16>(args, weights, top_k, stream);
  }
}

void convert_rows(const ConvertRows& args, CUstream_st* stream) {
  weigh_rows(args, nullptr, 1, stream);
}

void rms_norm_rows(float* rows, int64_t num_rows, int64_t columns, const float* weight,
                   double epsilon, CUstream_st* stream) {
  if (num_rows == 0) return;
  cuda::launch("layer.rms_norm", rms_norm_kernel,
               {.blocks = num_rows, .threads = kThreads, .stream = stream}, rows, columns, weight,
               epsilon);
}

void mix_factors(const float* logits, int64_t num_tokens, float* routed, float* shared,
                 CUstream_st* stream) {
  if (num_tokens == 0) return;
  cuda::launch("layer.mix_factors", mix_kernel,
               {.blocks = blocks_of(num_tokens), .threads = kThreads, .stream = stream}, logits,
               num_tokens, routed, shared);
}

void choose_replicas(const ChooseReplicas& args, CUstream_st* stream) {
  if (args.num_tokens == 0) return;
  cuda::launch(
      "layer.choose_replicas", replicas_kernel,
      {.blocks = blocks_of(args.num_tokens * args.top_k), .threads = kThreads, .stream = stream},
      args);
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

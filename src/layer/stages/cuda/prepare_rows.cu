#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/vector16.cuh"
#include "cuda/launch.h"
#include "layer/stages/cuda/prepare_rows.h"

#include "conclave/placement.h"

#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0 {
namespace {

constexpr int kThreads = 256;
constexpr int kPart = 8;  // columns that a thread converts at a time

// `weights` holds one weight per row of `out`, or is null; `copies` rows are made of each input
// row. A row has `parts` parts.
template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    convert_kernel(const __grid_constant__ ConvertRows args, const float* weights, int64_t copies,
                   int64_t parts, bool aligned) {
  // An earlier kernel may still be writing the rows.
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t step = int64_t{gridDim.x} * kThreads;
  const int64_t items = args.num_rows * parts;
  for (int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x; item < items; item += step) {
    const int64_t row = item / parts;
    const int64_t column = (item - row * parts) * kPart;
    const int64_t count = args.columns - column;
    const From* const from =
        static_cast<const From*>(args.rows) + row / copies * args.row_stride + column;
    To* const to = static_cast<To*>(args.out) + row * args.out_stride + column;
    const bool whole = aligned && count >= kPart;
    float x[kPart];
    if (whole) {
      cuda::device::load_8(from, x);
    } else {
#pragma unroll
      for (int i = 0; i < kPart; ++i) x[i] = i < count ? cuda::device::widen(from[i]) : 0.0F;
    }
    if (weights != nullptr) {
      const float weight = weights[row];
#pragma unroll
      for (float& value : x) value = __fmul_rn(value, weight);
    }
    if (whole) {
      cuda::device::store_8(x, to);
    } else {
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        if (i < count) to[i] = cuda::device::narrow<To>(x[i]);
      }
    }
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

bool is_aligned(const void* data, int64_t stride_bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride_bytes % 16 == 0;
}

template <class From, class To>
void launch_convert(const ConvertRows& args, const float* weights, int64_t copies,
                    CUstream_st* stream) {
  constexpr int64_t kMostBlocks = 4096;
  const int64_t parts = ceil_div(args.columns, int64_t{kPart});
  const bool aligned =
      is_aligned(args.rows, args.row_stride * static_cast<int64_t>(sizeof(From))) &&
      is_aligned(args.out, args.out_stride * static_cast<int64_t>(sizeof(To)));
  cuda::launch("layer.convert_rows", convert_kernel<From, To>,
               {.blocks = std::clamp<int64_t>(blocks_of(args.num_rows * parts), 1, kMostBlocks),
                .threads = kThreads,
                .stream = stream},
               args, weights, copies, parts, aligned);
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

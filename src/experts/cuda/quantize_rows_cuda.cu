#include "experts/cuda/quantize_rows_cuda.h"

#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "experts/cuda/fp8_math.cuh"

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0::experts {
namespace {

constexpr int kThreads = 256;
constexpr int kPart = 16;              // columns of a thread: one 16-byte store of codes
constexpr int kGroupParts = 128 / 16;  // threads that share a scale

enum class Vectors : uint8_t { kNo, kYes };  // whether all 16-byte accesses are aligned

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }

// Columns [0, count) of `source`, 0 beyond.
template <class T, Vectors kVectors>
__device__ __forceinline__ void load_part(const T* source, int32_t count, float (&x)[kPart]) {
  if (kVectors == Vectors::kYes && count >= kPart) {
    alignas(16) T raw[kPart];
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(raw) / 16); ++i) {
      reinterpret_cast<uint4*>(raw)[i] = __ldg(reinterpret_cast<const uint4*>(source) + i);
    }
#pragma unroll
    for (int i = 0; i < kPart; ++i) x[i] = widen(raw[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPart; ++i) x[i] = i < count ? widen(source[i]) : 0.0F;
}

template <Vectors kVectors>
__device__ __forceinline__ void store_part(uint8_t* target, int32_t count,
                                           const uint32_t (&words)[kPart / 4]) {
  if (kVectors == Vectors::kYes && count >= kPart) {
    *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    if (i < count) target[i] = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
  }
}

__device__ __forceinline__ float largest(const float (&x)[kPart]) {
  float amax = 0;
#pragma unroll
  for (int i = 0; i < kPart; ++i) amax = fmaxf(amax, fabsf(x[i]));
  return amax;
}

template <Vectors kVectors>
__device__ __forceinline__ void encode_part(const float (&x)[kPart], float scale, uint8_t* target,
                                            int32_t count) {
  uint32_t words[kPart / 4];
#pragma unroll
  for (int i = 0; i < kPart / 4; ++i) {
    const uint32_t low = pack_e4m3(__fdiv_rn(x[4 * i], scale), __fdiv_rn(x[4 * i + 1], scale));
    const uint32_t high = pack_e4m3(__fdiv_rn(x[4 * i + 2], scale), __fdiv_rn(x[4 * i + 3], scale));
    words[i] = low | high << 16;
  }
  store_part<kVectors>(target, count, words);
}

__device__ __forceinline__ int64_t live_rows(const QuantizeRowsCuda& args) {
  return args.live_rows == nullptr ? args.num_rows : min(args.num_rows, int64_t{*args.live_rows});
}

// A thread for every 16 columns; eight neighbours share a group.
template <class T, Vectors kVectors, bool kStatic>
__global__ void __launch_bounds__(kThreads) quantize_groups(const QuantizeRowsCuda args) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t groups = (args.columns + 127) / 128;
  const int64_t unit = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kGroupParts;
  const int64_t row = unit / groups;
  const int64_t group = unit % groups;
  const bool live = row < live_rows(args);
  const int64_t column = group * 128 + threadIdx.x % kGroupParts * kPart;
  const int32_t count =
      live ? static_cast<int32_t>(max(int64_t{0}, min(int64_t{kPart}, args.columns - column))) : 0;
  float x[kPart] = {};
  if (count > 0) {
    load_part<T, kVectors>(static_cast<const T*>(args.rows) + row * args.row_stride + column, count,
                           x);
  }
  float scale = 1;
  if constexpr (kStatic) {
    scale = *args.static_scale;
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      if (!isfinite(x[i])) x[i] = __int_as_float(0x7FC00000);
    }
  } else {
    float amax = largest(x);
#pragma unroll
    for (int distance = 1; distance < kGroupParts; distance *= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
    }
    scale = group_scale(amax, args.power_of_two);
    if (live && threadIdx.x % kGroupParts == 0) args.scales[row * args.scale_stride + group] = scale;
  }
  if (count > 0) encode_part<kVectors>(x, scale, args.codes + row * args.code_stride + column, count);
}

__device__ __forceinline__ float block_amax(float amax) {
  __shared__ float of_warp[kThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = amax;
  __syncthreads();
  amax = of_warp[threadIdx.x % (kThreads / 32)];
#pragma unroll
  for (int distance = kThreads / 64; distance > 0; distance /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
  }
  return amax;
}

// A block for a row. Up to 8192 columns stay in registers between the two passes.
template <class T, Vectors kVectors>
__global__ void __launch_bounds__(kThreads) quantize_whole_rows(const QuantizeRowsCuda args) {
  constexpr int kHeld = 2;
  constexpr int64_t kStep = int64_t{kThreads} * kPart;
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t row = blockIdx.x;
  if (row >= live_rows(args)) return;
  const T* source = static_cast<const T*>(args.rows) + row * args.row_stride;
  uint8_t* target = args.codes + row * args.code_stride;
  const int64_t first = int64_t{threadIdx.x} * kPart;
  const auto columns_left = [&](int64_t column) {
    return static_cast<int32_t>(max(int64_t{0}, min(int64_t{kPart}, args.columns - column)));
  };
  float held[kHeld][kPart];
  float amax = 0;
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    const int64_t column = first + h * kStep;
    load_part<T, kVectors>(source + column, columns_left(column), held[h]);
    amax = fmaxf(amax, largest(held[h]));
  }
  float x[kPart];
  for (int64_t column = first + kHeld * kStep; column < args.columns; column += kStep) {
    load_part<T, kVectors>(source + column, columns_left(column), x);
    amax = fmaxf(amax, largest(x));
  }
  const float scale = group_scale(block_amax(amax), args.power_of_two);
  if (threadIdx.x == 0) args.scales[row * args.scale_stride] = scale;
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    const int64_t column = first + h * kStep;
    if (column < args.columns) {
      encode_part<kVectors>(held[h], scale, target + column, columns_left(column));
    }
  }
  for (int64_t column = first + kHeld * kStep; column < args.columns; column += kStep) {
    load_part<T, kVectors>(source + column, columns_left(column), x);
    encode_part<kVectors>(x, scale, target + column, columns_left(column));
  }
}

template <class T, Vectors kVectors>
void enqueue(const QuantizeRowsCuda& args, CUstream_st* stream) {
  if (args.activations == ActivationScale::kToken) {
    cuda::launch("experts.quantize_rows", &quantize_whole_rows<T, kVectors>,
                 {.blocks = args.num_rows, .threads = kThreads, .stream = stream}, args);
    return;
  }
  const int64_t units = args.num_rows * ((args.columns + 127) / 128);
  const cuda::LaunchShape shape{.blocks = (units * kGroupParts + kThreads - 1) / kThreads,
                                .threads = kThreads,
                                .stream = stream};
  if (args.activations == ActivationScale::kTensorStatic) {
    cuda::launch("experts.quantize_static", &quantize_groups<T, kVectors, true>, shape, args);
  } else {
    cuda::launch("experts.quantize_groups", &quantize_groups<T, kVectors, false>, shape, args);
  }
}

template <class T>
void enqueue_as(const QuantizeRowsCuda& args, CUstream_st* stream) {
  const bool aligned = reinterpret_cast<uintptr_t>(args.rows) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(args.codes) % 16 == 0 &&
                       args.row_stride * static_cast<int64_t>(sizeof(T)) % 16 == 0 &&
                       args.code_stride % 16 == 0;
  aligned ? enqueue<T, Vectors::kYes>(args, stream) : enqueue<T, Vectors::kNo>(args, stream);
}

}  // namespace

void quantize_rows_cuda(const QuantizeRowsCuda& args, CUstream_st* stream) {
  if (args.num_rows == 0 || args.columns == 0) return;
  switch (args.dtype) {
    case DType::kF32:
      return enqueue_as<float>(args, stream);
    case DType::kF16:
      return enqueue_as<__half>(args, stream);
    default:
      return enqueue_as<__nv_bfloat16>(args, stream);
  }
}

}  // namespace conclave::inline v0::experts

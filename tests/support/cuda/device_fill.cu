#include "cuda/launch.h"
#include "support/cuda/device_fill.h"
#include "support/cuda/value.cuh"

#include "conclave/error.h"

#include <algorithm>

namespace conclave::testing {

namespace {

constexpr int kThreads = 256;
constexpr int kGroupColumns = 128;

template <class Element>
__global__ void normal_kernel(NormalMatrix m) {
  auto* data = static_cast<Element*>(m.data);
  for (int64_t row = blockIdx.x; row < m.rows; row += gridDim.x) {
    for (int64_t col = threadIdx.x; col < m.stride; col += kThreads) {
      const int64_t index = row * m.stride + col;
      const float value = device::random_normal(m.seed, static_cast<uint64_t>(index)) * m.deviation;
      data[index] = device::narrow<Element>(col < m.cols ? value : __int_as_float(0x7fffffff));
    }
  }
}

__global__ void scales_kernel(float* scales, int64_t count, float base, uint64_t seed) {
  const int64_t step = int64_t{kThreads} * gridDim.x;
  for (int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x; i < count; i += step) {
    const auto bits = static_cast<float>(device::random_bits(seed, static_cast<uint64_t>(i)) >> 40);
    scales[i] = base * exp2f(bits * 0x1p-24F - 0.5F);
  }
}

__device__ float block_maximum(float value) {
  __shared__ float partial[kThreads];
  partial[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) {
      partial[threadIdx.x] = fmaxf(partial[threadIdx.x], partial[threadIdx.x + half]);
    }
    __syncthreads();
  }
  const float result = partial[0];
  __syncthreads();
  return result;
}

// Uses one block per row, which processes one group of columns after the other.
template <class Element>
__global__ void quantize_kernel(QuantizeArgs a, int64_t group_columns) {
  const int64_t row = blockIdx.x;
  const Element* source = static_cast<const Element*>(a.rows.data) + row * a.rows.row_stride;
  auto* codes = static_cast<__nv_fp8_e4m3*>(const_cast<void*>(a.codes.data));
  auto* scales = const_cast<float*>(a.codes.scales);
  for (int64_t begin = 0, group = 0; begin < a.cols; begin += group_columns, ++group) {
    const int64_t end = min(a.cols, begin + group_columns);
    float amax = 0;
    for (int64_t col = begin + threadIdx.x; col < end; col += kThreads) {
      amax = fmaxf(amax, fabsf(static_cast<float>(source[col])));
    }
    amax = block_maximum(amax);
    const bool is_static = a.quant.activations == ActivationScale::kTensorStatic;
    const float step =
        is_static ? *a.static_step : device::quantization_step(amax, a.quant.power_of_two_scales);
    if (threadIdx.x == 0) scales[row * a.codes.scale_stride + group] = step;
    for (int64_t col = begin + threadIdx.x; col < end; col += kThreads) {
      const float scaled = static_cast<float>(source[col]) / step;
      codes[row * a.codes.row_stride + col] = device::narrow<__nv_fp8_e4m3>(scaled);
    }
  }
  for (int64_t col = a.cols + threadIdx.x; col < a.codes.row_stride; col += kThreads) {
    codes[row * a.codes.row_stride + col].__x = 0xff;
  }
}

__global__ void gather_kernel(GatherArgs args) {
  for (int64_t row = blockIdx.x; row < *args.num_rows; row += gridDim.x) {
    const int64_t token = args.row_slot[row] / args.top_k;
    const auto* from = static_cast<const uint8_t*>(args.from) + token * args.row_bytes;
    if (args.group_stride > 0) {
      const auto* scales = reinterpret_cast<const float*>(from);
      auto* to = static_cast<float*>(args.to) + row;
      for (int64_t g = threadIdx.x; g < args.row_bytes / 4; g += blockDim.x) {
        to[g * args.group_stride] = scales[g];
      }
      continue;
    }
    auto* to = static_cast<uint8_t*>(args.to) + row * args.row_bytes;
    for (int64_t i = threadIdx.x; i < args.row_bytes; i += blockDim.x) to[i] = from[i];
  }
}

cuda::LaunchShape shape(int64_t blocks, CUstream_st* stream) {
  return {.blocks = std::clamp<int64_t>(blocks, 1, 1 << 20),
          .threads = kThreads,
          .overlap = cuda::Overlap::kNone,
          .stream = stream};
}

}  // namespace

void gather_rows(const GatherArgs& args, CUstream_st* stream) {
  if (args.max_rows == 0) return;
  cuda::launch("testing.gather_rows", gather_kernel, shape(args.max_rows, stream), args);
}

void fill_normal(const NormalMatrix& matrix, CUstream_st* stream) {
  const auto fill = [&](auto kernel) {
    cuda::launch("testing.fill_normal", kernel, shape(matrix.rows, stream), matrix);
  };
  switch (matrix.dtype) {
    case DType::kF32:
      return fill(normal_kernel<float>);
    case DType::kF16:
      return fill(normal_kernel<__half>);
    case DType::kF8E4M3:
      return fill(normal_kernel<__nv_fp8_e4m3>);
    default:
      return fill(normal_kernel<__nv_bfloat16>);
  }
}

void fill_scales(float* scales, int64_t count, float base, uint64_t seed, CUstream_st* stream) {
  cuda::launch("testing.fill_scales", scales_kernel, shape((count + 255) / 256, stream), scales,
               count, base, seed);
}

void quantize_rows(const QuantizeArgs& args, CUstream_st* stream) {
  if (args.rows.num_rows == 0) return;
  const bool grouped = args.quant.activations == ActivationScale::kGroup;
  const int64_t group_columns = grouped ? kGroupColumns : args.cols;
  const auto kernel =
      args.rows.dtype == DType::kF16 ? quantize_kernel<__half> : quantize_kernel<__nv_bfloat16>;
  cuda::launch("testing.quantize_rows", kernel, shape(args.rows.num_rows, stream), args,
               group_columns);
}

}  // namespace conclave::testing

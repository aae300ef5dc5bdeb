#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "layer/cuda/gate_product.h"

#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0 {
namespace {

constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kLanes * kWarps;
// Rows that share a read of the weights.
constexpr int kRows = 4;

__device__ float widen(float value) { return value; }
__device__ float widen(__half value) { return __half2float(value); }
__device__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

__device__ float rounded(float value, DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return __half2float(__float2half_rn(value));
    case DType::kBF16:
      return __bfloat162float(__float2bfloat16_rn(value));
    default:
      return value;
  }
}

// A warp a logit of kRows rows: lanes stride over H, then add up pairwise.
template <class Row, class Weight>
__global__ void __launch_bounds__(kThreads) gate_kernel(const __grid_constant__ GateProduct args) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t row_blocks = (args.num_rows + kRows - 1) / kRows;
  const int64_t step = int64_t{gridDim.x} * kWarps;
  for (int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes;
       item < row_blocks * args.num_logits; item += step) {
    const int64_t logit = item % args.num_logits;
    const int64_t first = item / args.num_logits * kRows;
    const Weight* const weights =
        static_cast<const Weight*>(args.weights) + logit * args.weight_stride;
    float sums[kRows] = {};
    for (int64_t column = lane; column < args.columns; column += kLanes) {
      const float weight = widen(weights[column]);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int64_t row = min(first + i, args.num_rows - 1);
        const Row* const from = static_cast<const Row*>(args.rows) + row * args.row_stride;
        sums[i] = fmaf(widen(from[column]), weight, sums[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        sums[i] += __shfl_xor_sync(0xffffffffU, sums[i], distance);
      }
      if (lane != 0 || first + i >= args.num_rows) continue;
      const float biased = args.bias == nullptr ? sums[i] : sums[i] + args.bias[logit];
      args.out[(first + i) * args.out_stride + logit] = rounded(biased, args.rounded_to);
    }
  }
}

template <class Row, class Weight>
void launch_gate(const GateProduct& args, CUstream_st* stream) {
  constexpr int64_t kMostBlocks = 132 * 8;
  const int64_t items = (args.num_rows + kRows - 1) / kRows * args.num_logits;
  cuda::launch("layer.gate_product", gate_kernel<Row, Weight>,
               {.blocks = std::clamp<int64_t>((items + kWarps - 1) / kWarps, 1, kMostBlocks),
                .threads = kThreads,
                .stream = stream},
               args);
}

template <class Row>
void launch_for_rows(const GateProduct& args, CUstream_st* stream) {
  switch (args.weight_dtype) {
    case DType::kF32:
      return launch_gate<Row, float>(args, stream);
    case DType::kF16:
      return launch_gate<Row, __half>(args, stream);
    default:
      return launch_gate<Row, __nv_bfloat16>(args, stream);
  }
}

}  // namespace

void gate_product(const GateProduct& args, CUstream_st* stream) {
  if (args.num_rows == 0) return;
  switch (args.dtype) {
    case DType::kF32:
      return launch_for_rows<float>(args, stream);
    case DType::kF16:
      return launch_for_rows<__half>(args, stream);
    default:
      return launch_for_rows<__nv_bfloat16>(args, stream);
  }
}

}  // namespace conclave::inline v0

// One warp computes tiles of 16 tokens and 8 logits, straight from memory. The sum may take columns
// in any order that both operands share, so a lane reads 8 consecutive columns of each.
//
// All kernels share one order of additions: the columns are cut into kSegments segments; a segment
// is summed from zero in steps of 32 columns, and the segments are added in ascending order.
#pragma once

#include "cuda/device/mma.cuh"
#include "gemm/cuda/gate_pieces.cuh"

#include "conclave/dtype.h"

#include <cstdint>

namespace conclave::inline v0::gemm::device {

inline constexpr int kSegments = 16;
inline constexpr int kStepColumns = 32;  // 4 lanes x 8
inline constexpr int kTileTokens = 16;
inline constexpr int kTileLogits = 8;

template <class X, class W>
struct GateParams {
  Rows<X> rows;
  Rows<W> weights;
  const float* bias;
  DType logits_dtype;
  float* logits;

  // Columns per segment, a multiple of the step.
  __device__ __forceinline__ int64_t segment_columns() const {
    const int64_t steps = (rows.columns + kStepColumns - 1) / kStepColumns;
    return (steps + kSegments - 1) / kSegments * kStepColumns;
  }
};

template <int kLogitTiles>
struct Accumulators {
  float values[kLogitTiles][4] = {};

  __device__ __forceinline__ void add(const Accumulators& other) {
#pragma unroll
    for (int n = 0; n < kLogitTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[n][i] += other.values[n][i];
    }
  }
};

// Multiplies one step of columns for kTokenTiles x kLogitTiles tiles. It takes products of pieces
// whose orders sum to at most 2; the others are below the accumulator's last bit. Tiles are the
// inner loops, so that an instruction does not wait for the one before it. `rows` holds rows g and
// g + 8 of each tile.
template <class X, class W, int kTokenTiles, int kLogitTiles>
__device__ __forceinline__ void multiply(const Pieces<kPieces<X>> (&rows)[2 * kTokenTiles],
                                         const Pieces<kPieces<W>> (&weights)[kLogitTiles],
                                         Accumulators<kLogitTiles> (&sums)[kTokenTiles]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int x = 0; x < kPieces<X>; ++x) {
#pragma unroll
      for (int w = 0; w < kPieces<W>; ++w) {
        if (x + w > 2) continue;
#pragma unroll
        for (int n = 0; n < kLogitTiles; ++n) {
#pragma unroll
          for (int m = 0; m < kTokenTiles; ++m) {
            const uint32_t(&first)[4] = rows[2 * m].words[x];
            const uint32_t(&second)[4] = rows[2 * m + 1].words[x];
            const uint32_t(&weight)[4] = weights[n].words[w];
            cuda::device::mma_m16n8k16_bf16(sums[m].values[n], first[2 * half], second[2 * half],
                                            first[2 * half + 1], second[2 * half + 1],
                                            weight[2 * half], weight[2 * half + 1]);
          }
        }
      }
    }
  }
}

// Sums segment `segment` of kTokenTiles x kLogitTiles tiles from first_token and first_logit on.
template <class X, class W, int kTokenTiles, int kLogitTiles, int kUnroll>
__device__ __forceinline__ void sum_segment(const GateParams<X, W>& params, int64_t first_token,
                                            int64_t first_logit, int segment,
                                            Accumulators<kLogitTiles> (&sums)[kTokenTiles]) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int64_t columns = params.segment_columns();
  const int64_t begin = segment * columns;
  const int64_t end = begin + columns < params.rows.columns ? begin + columns : params.rows.columns;
#pragma unroll kUnroll
  for (int64_t step = begin; step < end; step += kStepColumns) {
    const int64_t column = step + lane % 4 * 8;
    Pieces<kPieces<X>> rows[2 * kTokenTiles];
#pragma unroll
    for (int m = 0; m < 2 * kTokenTiles; ++m) {
      rows[m] = params.rows.load(first_token + m * 8 + lane / 4, column);
    }
    Pieces<kPieces<W>> weights[kLogitTiles];
#pragma unroll
    for (int n = 0; n < kLogitTiles; ++n) {
      weights[n] = params.weights.load(first_logit + n * kTileLogits + lane / 4, column);
    }
    multiply<X, W, kTokenTiles, kLogitTiles>(rows, weights, sums);
  }
}

__device__ __forceinline__ float rounded(float value, DType dtype) {
  if (dtype == DType::kBF16) return __bfloat162float(__float2bfloat16_rn(value));
  if (dtype == DType::kF16) return __half2float(__float2half_rn(value));
  return value;
}

template <class X, class W>
__device__ __forceinline__ void store_logit(const GateParams<X, W>& params, int64_t token,
                                            int64_t logit, float sum) {
  const int64_t logits = params.weights.count;
  if (token >= params.rows.count || logit >= logits) return;
  if (params.bias != nullptr) sum += params.bias[logit];
  params.logits[token * logits + logit] = rounded(sum, params.logits_dtype);
}

// Token and logit of element i of a lane's four.
__device__ __forceinline__ int64_t token_of(int64_t first_token, int i) {
  return first_token + static_cast<int32_t>(threadIdx.x % 32) / 4 + i / 2 * 8;
}
__device__ __forceinline__ int64_t logit_of(int64_t first_logit, int i) {
  return first_logit + static_cast<int32_t>(threadIdx.x % 4) * 2 + i % 2;
}

}  // namespace conclave::inline v0::gemm::device

// A whole small forward in one launch, for at most eight tokens. Weights are all that costs time:
// every warp keeps its own ring of weight boxes in flight by TMA, from the first instruction to the
// last, across the one grid barrier between the up and the down product. All else is repeated by
// every block: tables of experts, conversion of the rows.
//
// Products run as mma.sync with weights as the 16 rows and tokens as the 8 columns; column t is
// token t. Lane (g, q) = (lane / 4, lane % 4) reads 16 contiguous bytes of row g where the product
// wants elements 2q, 2q + 8, ...: K is permuted, alike for weights and rows. Equal to
// experts/reference for each token by itself: a token's sums do not depend on the others.
#pragma once

#include "cuda/device/copy.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/tma.cuh"
#include "experts/cuda/decode_down.cuh"
#include "experts/cuda/decode_prologue.cuh"
#include "experts/cuda/decode_up.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

__device__ __forceinline__ void write_output(const DecodeParams& params, int64_t at, float value) {
  switch (params.call.out_dtype) {
    case DType::kF32:
      static_cast<float*>(params.call.out)[at] = value;
      return;
    case DType::kF16:
      static_cast<__half*>(params.call.out)[at] = __float2half_rn(value);
      return;
    default:
      static_cast<__nv_bfloat16*>(params.call.out)[at] = __float2bfloat16_rn(value);
  }
}

// Weighted sum over slots 0 to k - 1 in float32, rounded once.
__device__ void combine(const DecodeParams& params, const Shared& shared, int tokens) {
  const DecodePlan& plan = params.plan;
  const DecodeTables& tables = *shared.tables;
  const int block_rows = plan.block_rows();
  const int first_row = static_cast<int>(blockIdx.x) * block_rows;
  const int rows = min(block_rows, plan.hidden_size - first_row);
  for (int i = static_cast<int>(threadIdx.x); i < tokens * rows; i += kDecodeThreads) {
    const int token = i / rows;
    const int row = i - token * rows;
    float sum = 0;
    for (int pair = token * plan.top_k; pair < (token + 1) * plan.top_k; ++pair) {
      if (tables.pair_expert[pair] < 0) continue;
      const float* parts =
          shared.sums + tables.pair_source[pair] * plan.k_slices * block_rows + row;
      float value = parts[0];
      for (int slice = 1; slice < plan.k_slices; ++slice) value += parts[slice * block_rows];
      sum = fmaf(params.call.weight_on_input ? 1.0F : tables.pair_weight[pair], value, sum);
    }
    write_output(params, token * params.call.out_stride + first_row + row,
                 sum * params.call.output_scale);
  }
}

// All blocks of the grid. The word's highest bit turns over each time and the others return to 0,
// so that nothing is cleared between launches, whatever their grids.
__device__ __forceinline__ void grid_barrier(uint32_t* word) {
  __syncthreads();
  if (threadIdx.x == 0) {
    constexpr uint32_t kTurn = 0x80000000U;
    __threadfence();
    const uint32_t before = ptx::add_release(word, blockIdx.x == 0 ? kTurn - (gridDim.x - 1) : 1U);
    while (((ptx::load_acquire(word) ^ before) & kTurn) == 0) {
    }
    __threadfence();
  }
  __syncthreads();
}

__device__ __forceinline__ int live_tokens(const DecodeParams& params) {
  int64_t tokens = params.call.num_tokens;
  if (params.call.live_tokens != nullptr)
    tokens = max(int64_t{0}, min(tokens, *params.call.live_tokens));
  return static_cast<int>(tokens);
}

template <DecodeElement kElement>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    decode_experts(const __grid_constant__ DecodeParams params) {
  using C = Config<kElement>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Thread me;
  const Shared shared = {memory, reinterpret_cast<DecodeTables*>(memory + params.shared.tables),
                         reinterpret_cast<float*>(memory + params.shared.row_scales),
                         memory + params.shared.rows,
                         reinterpret_cast<float*>(memory + params.shared.rows)};
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&params.up_map);
    ptx::prefetch_tensor_map(&params.down_map);
    uint64_t* barriers = reinterpret_cast<uint64_t*>(memory + params.shared.barriers);
    for (int i = 0; i < kDecodeWarps * params.shared.stages; ++i)
      ptx::mbarrier_init(barriers + i, C::kBlockScales ? 33 : 1);
    ptx::fence_mbarrier_init();
  }
  ptx::grid_dependency_wait();
  const int tokens = live_tokens(params);
  if (tokens == 0) return;
  const int units = make_tables(params, *shared.tables, me, tokens);

  const Work work(params.plan, units, me.warp);
  Ring<C> ring(params, shared, me.warp);
  Producer<C> producer(params, shared, work, me.lane);
  for (int slot = 0; slot < ring.stages; ++slot) producer.issue(ring, slot);
  if constexpr (C::kIsE4M3) {
    quantize_rows(params, shared, me, tokens);
  } else {
    convert_rows<C>(params, shared, tokens);
  }
  __syncthreads();
  run_up<C>(params, shared, me, work, ring, producer);
  grid_barrier(static_cast<uint32_t*>(params.call.workspace));
  ptx::grid_launch_dependents();
  if constexpr (C::kRowScales) find_pair_scales(params, shared, me, tokens);
  run_down<C>(params, shared, me, work, ring, producer);
  __syncthreads();
  combine(params, shared, tokens);
}

}  // namespace conclave::inline v0::experts::decode

// The gate product of many tokens: rows and weights come through a ring of stages in shared memory.
// It runs the same instructions in the same order as sum_segment, and so gives the same bits.
#pragma once

#include "cuda/device/copy.cuh"
#include "gemm/cuda/gate_tile.cuh"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::gemm::device {

// A block has four warps of 32 tokens and 64 logits: 12 loads of shared memory feed 32 matrix
// instructions, which take as long. With float32 rows or weights, pieces take more registers, so
// there are half as many logits.
template <class X, class W>
struct StagedConfig {
  static constexpr int kWarps = 4;
  static constexpr int kTokens = kWarps * 2 * kTileTokens;
  static constexpr int kLogitTiles = sizeof(X) == 2 && sizeof(W) == 2 ? 8 : 4;
  static constexpr int kLogits = kLogitTiles * kTileLogits;
  static constexpr int kColumns = sizeof(X) == 2 && sizeof(W) == 2 ? 64 : 32;
  static constexpr int kRowBytes = kTokens * kColumns * static_cast<int>(sizeof(X));
  static constexpr int kStageBytes = kRowBytes + kLogits * kColumns * static_cast<int>(sizeof(W));
  static constexpr int kStages = 4;  // 96 KiB: two blocks per multiprocessor
  static constexpr size_t kSharedBytes = size_t{kStageBytes} * kStages;
  static_assert(kColumns % kStepColumns == 0);
};

// Rows of kColumns elements in shared memory, in chunks of 16 bytes. If a row is 128 bytes, odd
// rows swap chunks so that the 8 lanes of a load use all banks.
template <class T, int kColumns>
struct StagedRows {
  static constexpr int kChunks = kColumns * static_cast<int>(sizeof(T)) / 16;
  static constexpr uint32_t kSwap = kChunks < 8 ? 0 : (sizeof(T) == 4 ? 1 : 4);

  static __device__ __forceinline__ uint32_t offset(uint32_t row, uint32_t chunk) {
    return (row * kChunks + (chunk ^ (row % 2 * kSwap))) * 16;
  }

  // All threads of the block request kRows rows from `first` on, kColumns columns from `column` on.
  template <int kRows, int kThreads>
  static __device__ __forceinline__ void request(const Rows<T>& rows, int64_t first, int64_t column,
                                                 uint32_t to) {
    constexpr int kPerChunk = 16 / static_cast<int>(sizeof(T));
    static_assert(kRows * kChunks % kThreads == 0);
#pragma unroll
    for (int i = 0; i < kRows * kChunks / kThreads; ++i) {
      const uint32_t index = threadIdx.x + static_cast<uint32_t>(i) * kThreads;
      const uint32_t row = index / kChunks;
      const uint32_t chunk = index % kChunks;
      const int64_t at = column + chunk * kPerChunk;
      const int64_t left = first + row < rows.count ? rows.columns - at : 0;
      const int64_t elements = left < 0 ? 0 : (left < kPerChunk ? left : kPerChunk);
      const T* from = rows.data + (elements == 0 ? 0 : (first + row) * rows.stride + at);
      cuda::device::cp_async_16_part(to + offset(row, chunk), from,
                                     static_cast<int32_t>(elements * sizeof(T)));
    }
  }

  // Loads the 8 columns of a row from 32 step + 8 (lane % 4) on.
  static __device__ __forceinline__ Pieces<kPieces<T>> load(const std::byte* stage, uint32_t row,
                                                            uint32_t step) {
    const uint32_t part = step * 4 + threadIdx.x % 4;
    if constexpr (sizeof(T) == 4) {
      const float4 low = *reinterpret_cast<const float4*>(stage + offset(row, 2 * part));
      const float4 high = *reinterpret_cast<const float4*>(stage + offset(row, 2 * part + 1));
      float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      return split<kPieces<T>>(values);
    } else {
      const uint4 bits = *reinterpret_cast<const uint4*>(stage + offset(row, part));
      if constexpr (kPieces<T> == 1) {
        return {{{bits.x, bits.y, bits.z, bits.w}}};
      } else {
        float values[8];
        cuda::device::widen_8<T>(bits, values);
        return split<kPieces<T>>(values);
      }
    }
  }
};

template <class X, class W>
struct StagedTile {
  using Config = StagedConfig<X, W>;
  using XRows = StagedRows<X, Config::kColumns>;
  using WRows = StagedRows<W, Config::kColumns>;
  static constexpr int kThreads = Config::kWarps * 32;

  const GateParams<X, W>& params;
  std::byte* memory;
  int64_t first_token;
  int64_t first_logit;

  __device__ __forceinline__ std::byte* stage(int64_t index) const {
    return memory + index % Config::kStages * Config::kStageBytes;
  }

  __device__ __forceinline__ void request(int64_t index) const {
    const int64_t column = index * Config::kColumns;
    const uint32_t to = cuda::device::shared_address(stage(index));
    if (column < params.rows.columns) {
      XRows::template request<Config::kTokens, kThreads>(params.rows, first_token, column, to);
      WRows::template request<Config::kLogits, kThreads>(params.weights, first_logit, column,
                                                         to + Config::kRowBytes);
    }
    cuda::device::cp_async_commit_group();
  }

  __device__ __forceinline__ void multiply_step(
      const std::byte* from, uint32_t step, Accumulators<Config::kLogitTiles> (&sums)[2]) const {
    const uint32_t row = threadIdx.x / 32 * 2 * kTileTokens + threadIdx.x % 32 / 4;
    Pieces<kPieces<X>> x[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) x[i] = XRows::load(from, row + 8 * i, step);
    Pieces<kPieces<W>> weights[Config::kLogitTiles];
#pragma unroll
    for (uint32_t n = 0; n < Config::kLogitTiles; ++n) {
      weights[n] =
          WRows::load(from + Config::kRowBytes, n * kTileLogits + threadIdx.x % 32 / 4, step);
    }
    multiply<X, W, 2, Config::kLogitTiles>(x, weights, sums);
  }

  // Computes the totals of the warp's two tiles of tokens.
  __device__ __forceinline__ void sum(Accumulators<Config::kLogitTiles> (&totals)[2]) const {
    const int64_t steps = (params.rows.columns + kStepColumns - 1) / kStepColumns;
    const int64_t segment_steps = params.segment_columns() / kStepColumns;
    constexpr int kStageSteps = Config::kColumns / kStepColumns;
    const int64_t stages = (steps + kStageSteps - 1) / kStageSteps;
    for (int64_t s = 0; s < Config::kStages - 1; ++s) request(s);
    Accumulators<Config::kLogitTiles> sums[2];
    int64_t step = 0;
    int64_t segment_end = segment_steps;
    for (int64_t s = 0; s < stages; ++s) {
      cuda::device::cp_async_wait_group<Config::kStages - 2>();
      __syncthreads();
      request(s + Config::kStages - 1);
#pragma unroll
      for (uint32_t i = 0; i < kStageSteps; ++i, ++step) {
        if (step >= steps) break;
        if (step == segment_end) {
          close_segment(totals, sums);
          segment_end += segment_steps;
        }
        multiply_step(stage(s), i, sums);
      }
    }
    close_segment(totals, sums);
    cuda::device::cp_async_wait_group<0>();
  }

 private:
  static __device__ __forceinline__ void close_segment(
      Accumulators<Config::kLogitTiles> (&totals)[2],
      Accumulators<Config::kLogitTiles> (&sums)[2]) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      totals[m].add(sums[m]);
      sums[m] = {};
    }
  }
};

}  // namespace conclave::inline v0::gemm::device

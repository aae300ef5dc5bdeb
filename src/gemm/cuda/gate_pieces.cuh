// Numbers as sums of bf16 pieces, so that one matrix instruction serves all types: float32 is the
// sum of three (with 8 of its 24 bits each), f16 is the sum of two, and bf16 is one piece.
#pragma once

#include "cuda/device/vector16.cuh"

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0::gemm::device {

template <class T>
inline constexpr int kPieces = 3;
template <>
inline constexpr int kPieces<__half> = 2;
template <>
inline constexpr int kPieces<__nv_bfloat16> = 1;

// Eight consecutive numbers: word w of a piece holds numbers 2 w and 2 w + 1.
template <int kCount>
struct Pieces {
  uint32_t words[kCount][4];
};

// Takes the next piece of two numbers, which keep the rest. Inf leaves no rest.
__device__ __forceinline__ uint32_t take_piece(float& low, float& high) {
  const __nv_bfloat162 piece = __floats2bfloat162_rn(low, high);
  const float low_piece = __low2float(piece);
  const float high_piece = __high2float(piece);
  low = isfinite(low_piece) ? low - low_piece : 0.0F;
  high = isfinite(high_piece) ? high - high_piece : 0.0F;
  return *reinterpret_cast<const uint32_t*>(&piece);
}

template <int kCount>
__device__ __forceinline__ Pieces<kCount> split(float (&values)[8]) {
  Pieces<kCount> result;
#pragma unroll
  for (int piece = 0; piece < kCount; ++piece) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      result.words[piece][w] = take_piece(values[2 * w], values[2 * w + 1]);
    }
  }
  return result;
}

// A matrix as the product reads it.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
  int64_t count;
  int64_t columns;
  bool aligned;  // every row begins at a multiple of 16 bytes

  // Loads columns [column, column + 8) of a row, with zeros beyond the matrix.
  __device__ __forceinline__ Pieces<kPieces<T>> load(int64_t row, int64_t column) const {
    Pieces<kPieces<T>> result = {};
    if (row >= count || column >= columns) return result;
    const T* from = data + row * stride + column;
    if (aligned && column + 8 <= columns) {
      if constexpr (kPieces<T> == 1) {
        const uint4 bits = *reinterpret_cast<const uint4*>(from);
        return {{{bits.x, bits.y, bits.z, bits.w}}};
      } else {
        float values[8];
        cuda::device::load_8(from, values);
        return split<kPieces<T>>(values);
      }
    }
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = column + i < columns ? cuda::device::widen(from[i]) : 0.0F;
    }
    return split<kPieces<T>>(values);
  }
};

}  // namespace conclave::inline v0::gemm::device

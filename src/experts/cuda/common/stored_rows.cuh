// Codes of whole rows, made by warps that find a row stored as float32 to its last column, so that
// no launch has to follow. The rule, and every bit, is that of quantize_rows.h.
#pragma once

#include "experts/cuda/common/exact_quotient.cuh"
#include "experts/cuda/common/row_rules.cuh"

#include <cstdint>

namespace conclave::inline v0::experts {

// Says where rows lie; strides are multiples of 16 elements, and addresses of 16 bytes.
struct StoredRows {
  const float* values = nullptr;  // [rows, stride]
  uint8_t* codes = nullptr;       // [rows, stride]
  float* scales = nullptr;        // [rows]
  int64_t stride = 0;
  int32_t columns = 0;  // a multiple of four
  bool power_of_two = false;
};

// A warp holds 1024 columns of a row, of which each lane has so many times four.
constexpr int32_t kQuadsOfLane = 8;
constexpr int32_t kColumnsOfQuads = 32 * 4;
constexpr int32_t kColumnsHeld = kQuadsOfLane * kColumnsOfQuads;

// A lane's columns from one on. Behind the row's end lie its last four again, so that nothing is
// left out: these count for the largest magnitude anyway, and lanes that store them store the same.
struct HeldColumns {
  float4 quad[kQuadsOfLane];

  static __device__ __forceinline__ int32_t column_of(int32_t first, int i, int32_t columns) {
    return min(first + i * kColumnsOfQuads, columns - 4);
  }
  // Loads bypass L1, since other multiprocessors have written the values.
  __device__ __forceinline__ void load(const float* row, int32_t first, int32_t columns) {
#pragma unroll
    for (int i = 0; i < kQuadsOfLane; ++i) {
      quad[i] = __ldcg(reinterpret_cast<const float4*>(row + column_of(first, i, columns)));
    }
  }
  template <class Rule>
  __device__ __forceinline__ float larger(float amax) const {
#pragma unroll
    for (int i = 0; i < kQuadsOfLane; ++i) {
      amax = Rule::larger(Rule::larger(amax, quad[i].x), quad[i].y);
      amax = Rule::larger(Rule::larger(amax, quad[i].z), quad[i].w);
    }
    return amax;
  }
  template <class Rule>
  __device__ __forceinline__ void store(uint8_t* row, int32_t first, int32_t columns,
                                        const Inverse& inverse) const {
#pragma unroll
    for (int i = 0; i < kQuadsOfLane; ++i) {
      const float4& x = quad[i];
      *reinterpret_cast<uint32_t*>(row + column_of(first, i, columns)) = Rule::pack_near(
          times(x.x, inverse), times(x.y, inverse), times(x.z, inverse), times(x.w, inverse));
    }
  }
};

// Makes a lane's codes of a row for any scale, slowly.
template <class Rule>
__device__ __forceinline__ void divide_row(const float* values, uint8_t* codes, int32_t first,
                                           int32_t columns, float scale) {
#pragma unroll 1
  for (int32_t column = first; column < columns; column += kColumnsOfQuads) {
    const float4 x = __ldcg(reinterpret_cast<const float4*>(values + column));
    *reinterpret_cast<uint32_t*>(codes + column) = Rule::pack(
        __fdiv_rn(x.x, scale), __fdiv_rn(x.y, scale), __fdiv_rn(x.z, scale), __fdiv_rn(x.w, scale));
  }
}

// A warp makes scales and codes of rows `first`, `first + step` and so on, below `end`. A row that
// it cannot hold is read from its last columns to its first, which finds the scale, and back. What
// comes next is asked for before the columns at hand are used. There is one loop, with each part of
// it once, because a block runs it once or a few times and instructions come from memory, too.
template <class Rule>
__device__ __forceinline__ void encode_stored_rows(const StoredRows& rows, int32_t first,
                                                   int32_t end, int32_t step) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t back = (rows.columns - 1) / kColumnsHeld;  // turns from a row's end to its begin
  // The first turn of the loop only asks for what the second one uses.
  int32_t row = first - step;
  int32_t turn = back;
  Inverse inverse = {};
  HeldColumns next = {};
  float amax = 0;
#pragma unroll 1
  while (row < end) {
    const HeldColumns held = next;
    const int32_t next_row = turn == back ? row + step : row;
    const int32_t next_turn = turn == back ? -back : turn + 1;
    // Behind the last row, it is asked for again.
    next.load(rows.values + min(next_row, end - 1) * rows.stride,
              abs(next_turn) * kColumnsHeld + lane * 4, rows.columns);
    if (row >= first) {
      if (turn <= 0) amax = held.larger<Rule>(amax);
      if (turn == 0) {
#pragma unroll
        for (int32_t distance = 16; distance > 0; distance /= 2) {
          amax = Rule::larger(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
        }
        const float scale = Rule::scale(amax, rows.power_of_two);
        amax = 0;
        if (lane == 0) rows.scales[row] = scale;
        inverse = has_inverse(scale) ? inverse_of(scale) : Inverse{scale, 0};
        if (inverse.inverse == 0) {
          divide_row<Rule>(rows.values + row * rows.stride, rows.codes + row * rows.stride,
                           lane * 4, rows.columns, scale);
        }
      }
      if (turn >= 0 && inverse.inverse != 0) {
        held.store<Rule>(rows.codes + row * rows.stride, abs(turn) * kColumnsHeld + lane * 4,
                         rows.columns, inverse);
      }
    }
    row = next_row;
    turn = next_turn;
  }
}

}  // namespace conclave::inline v0::experts

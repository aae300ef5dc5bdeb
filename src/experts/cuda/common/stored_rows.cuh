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

// A warp holds 1024 columns of its row. The code stays short: a block runs it once or a few times,
// and instructions come from memory, too.
template <class Rule>
struct StoredRow {
  static constexpr int32_t kQuads = 8;  // a lane has so many times four columns
  static constexpr int32_t kQuad = 4;
  static constexpr int32_t kColumns = 32 * kQuad * kQuads;

  const float* values;
  uint8_t* codes;
  int32_t columns;
  float4 held[kQuads];

  __device__ __forceinline__ StoredRow(const StoredRows& rows, int32_t row)
      : values(rows.values + row * rows.stride + first_column()),
        codes(rows.codes + row * rows.stride + first_column()),
        columns(rows.columns - first_column()) {}

  static __device__ __forceinline__ int32_t first_column() {
    return static_cast<int32_t>(threadIdx.x) % 32 * kQuad;
  }
  // The column of a quad that the lane holds from `begin` on, counted from its first column.
  static __device__ __forceinline__ int32_t column_of(int32_t begin, int quad) {
    return begin + quad * (32 * kQuad);
  }

  // Loads bypass L1, since other multiprocessors have written the values.
  __device__ __forceinline__ void load(int32_t begin) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      held[i] = make_float4(0, 0, 0, 0);
      const int32_t column = column_of(begin, i);
      if (column < columns) held[i] = __ldcg(reinterpret_cast<const float4*>(values + column));
    }
  }
  __device__ __forceinline__ float larger(float amax) const {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      amax = Rule::larger(Rule::larger(amax, held[i].x), held[i].y);
      amax = Rule::larger(Rule::larger(amax, held[i].z), held[i].w);
    }
    return amax;
  }
  __device__ __forceinline__ void store(int32_t begin, const Inverse& inverse) const {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float4& x = held[i];
      const int32_t column = column_of(begin, i);
      if (column < columns) {
        *reinterpret_cast<uint32_t*>(codes + column) = Rule::pack_near(
            times(x.x, inverse), times(x.y, inverse), times(x.z, inverse), times(x.w, inverse));
      }
    }
  }
  // Does the same, slowly, for any scale.
  __device__ __forceinline__ void divide_all(float scale) const {
#pragma unroll 1
    for (int32_t column = 0; column < columns; column += 32 * kQuad) {
      const float4 x = __ldcg(reinterpret_cast<const float4*>(values + column));
      *reinterpret_cast<uint32_t*>(codes + column) =
          Rule::pack(__fdiv_rn(x.x, scale), __fdiv_rn(x.y, scale), __fdiv_rn(x.z, scale),
                     __fdiv_rn(x.w, scale));
    }
  }
};

// A warp makes a row's scale and codes. Rows that it cannot hold are read twice.
template <class Rule>
__device__ __forceinline__ void encode_stored_row(const StoredRows& rows, int32_t index) {
  using Row = StoredRow<Rule>;
  Row row(rows, index);
  float amax = 0;
  int32_t begin = (rows.columns - 1) / Row::kColumns * Row::kColumns;
#pragma unroll 1
  for (;; begin -= Row::kColumns) {
    row.load(begin);
    amax = row.larger(amax);
    if (begin == 0) break;
  }
#pragma unroll
  for (int32_t distance = 16; distance > 0; distance /= 2) {
    amax = Rule::larger(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
  }
  const float scale = Rule::scale(amax, rows.power_of_two);
  if (threadIdx.x % 32 == 0) rows.scales[index] = scale;
  if (!has_inverse(scale)) {
    row.divide_all(scale);
    return;
  }
  const Inverse inverse = inverse_of(scale);
#pragma unroll 1
  for (;;) {
    row.store(begin, inverse);
    begin += Row::kColumns;
    if (begin >= rows.columns) break;
    row.load(begin);
  }
}

}  // namespace conclave::inline v0::experts

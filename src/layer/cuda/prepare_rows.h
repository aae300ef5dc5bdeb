// Small steps between the caller's tensors and what kernels read.
#pragma once

#include "conclave/dtype.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0 {

// Rows of one type to rows of another, rounded to nearest even: f32, f16 or bf16 each.
struct ConvertRows {
  const void* rows = nullptr;  // [num_rows, row_stride]
  DType dtype = DType::kF32;
  int64_t row_stride = 0;  // elements
  int64_t num_rows = 0;
  int64_t columns = 0;
  void* out = nullptr;
  DType out_dtype = DType::kBF16;
  int64_t out_stride = 0;
};
// Enqueues one launch, which overlaps with what precedes it; nothing for no rows.
void convert_rows(const ConvertRows& args, CUstream_st* stream);

// What the live-token count of a call says of its chunk of `count` tokens from `begin` on:
// *out = *live - begin within [0, count].
void chunk_live_tokens(const int64_t* live, int64_t begin, int64_t count, int64_t* out,
                       CUstream_st* stream);

// values[i] = 1 / (1 + exp(-values[i]))
void sigmoid_in_place(float* values, int64_t count, CUstream_st* stream);

}  // namespace conclave::inline v0

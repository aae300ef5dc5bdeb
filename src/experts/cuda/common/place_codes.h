// Puts rows that are codes already, and came from elsewhere, where a kernel reads them: the launch
// that stands in the place of the one that makes codes.
#pragma once

#include "conclave/dtype.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::experts {

// Rows of codes, a byte each, as quantize_rows_cuda makes them.
struct CodedRows {
  const uint8_t* codes = nullptr;  // [num_rows, code_stride], rows at multiples of 16 bytes
  DType dtype{};                   // has a byte, as rows beside weights of a byte do
  int64_t num_rows = 0;
  int64_t columns = 0;
  int64_t code_stride = 0;
  // The scale of row r and group g of its columns lies at r * scale_stride + g.
  const float* scales = nullptr;
  int64_t scale_stride = 0;
  int64_t columns_of_group = 0;  // a multiple of 16, or `columns` for one scale a row
};

struct PlaceCodes {
  CodedRows rows;
  uint8_t* codes = nullptr;  // [targets, code_stride], rows at multiples of 16 bytes
  int64_t code_stride = 0;
  // The scale of target t and group g is put to t * scale_stride + g * group_stride.
  float* scales = nullptr;
  int64_t scale_stride = 0;
  int64_t group_stride = 1;
  // [num_rows, top_k], or null: the targets of each row; negative ones are skipped.
  const int32_t* slot_row = nullptr;
  int32_t top_k = 1;
};
// Enqueues one launch, which overlaps with what precedes it and waits for that before it lets the
// next one begin; none if there are no rows.
void place_codes(const PlaceCodes& args, CUstream_st* stream);

// The values of codes in bf16, as round_rows_cuda makes them of the rows themselves: with the
// scales of groups in them, or, if `factors` is given, with the scale of a whole row there.
struct CodeRowValues {
  CodedRows rows;
  void* values = nullptr;  // [num_rows, value_stride] bf16, rows at multiples of 16 bytes
  int64_t value_stride = 0;
  float* factors = nullptr;  // [num_rows]
};
void code_row_values(const CodeRowValues& args, CUstream_st* stream);

}  // namespace conclave::inline v0::experts

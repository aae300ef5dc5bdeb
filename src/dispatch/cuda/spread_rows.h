// Copies token rows into the order of the grouping, on the device.
#pragma once

#include "conclave/dtype.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::dispatch {

// Copies token t's row to row slot_row[t * k + s] of `out`, for each of its k slots that has one.
struct SpreadRows {
  const void* rows = nullptr;  // [num_rows, row_stride]: tokens
  DType dtype = DType::kBF16;  // kF32, kBF16 or kF16
  int64_t row_stride = 0;      // elements
  int64_t num_rows = 0;
  const int64_t* live_rows = nullptr;  // on the device, or null; if given, only the first
                                       // *live_rows count
  int64_t columns = 0;
  const int32_t* slot_row = nullptr;  // [num_rows * top_k], GroupedRows::slot_row
  int32_t top_k = 0;
  void* out = nullptr;             // rows at multiples of 16 bytes
  DType out_dtype = DType::kBF16;  // kBF16 or kF16; rounded to nearest even
  int64_t out_stride = 0;          // elements; columns from `columns` on are not written
};

// Enqueues one launch, which overlaps with its predecessor; enqueues nothing for no rows. Throws
// Error(kMisaligned) if rows of `out` do not begin at multiples of 16 bytes.
void spread_rows(const SpreadRows& args, CUstream_st* stream);

}  // namespace conclave::inline v0::dispatch

// Layout of rows for kernels: strides of whole 16 bytes.
#pragma once

#include "core/checked.h"
#include "core/weight_types.h"
#include "quant/activation_rows.h"

#include "conclave/dtype.h"

#include <cstdint>

namespace conclave::inline v0 {

inline constexpr int64_t kRowAlignmentBytes = 16;

// Row stride in elements for rows of `columns` elements.
inline int64_t padded_row(int64_t columns, DType dtype) {
  return round_up(packed_bytes(dtype, columns), kRowAlignmentBytes) * 8 / bit_size(dtype);
}

// Columns of a quantised row that share one scale.
inline constexpr int64_t kScaleColumns = quant::kActivationGroup;

// Stride of rows with a code per byte.
inline int64_t padded_codes(int64_t columns) { return round_up(columns, kRowAlignmentBytes); }

// Layout of quantised rows for kernels of sorted rows: codes, then scales, the scales of one column
// group side by side.
struct SortedCodes {
  int64_t row_stride = 0;    // bytes
  int64_t group_stride = 0;  // elements, in whole 16 bytes
  int64_t scales = 0;        // byte offset of the scales
  int64_t bytes = 0;
};
inline SortedCodes sorted_codes(int64_t rows, int64_t columns) {
  SortedCodes layout;
  layout.row_stride = padded_codes(columns);
  layout.group_stride = padded_row(rows, DType::kF32);
  layout.scales = round_up(rows * layout.row_stride, kRowAlignmentBytes);
  layout.bytes = layout.scales + ceil_div(columns, kScaleColumns) * layout.group_stride *
                                     static_cast<int64_t>(sizeof(float));
  return layout;
}

}  // namespace conclave::inline v0

// Rows as the kernels read them: strides of whole 16 bytes.
#pragma once

#include "core/checked.h"

#include "conclave/dtype.h"

#include <cstdint>

namespace conclave::inline v0 {

inline constexpr int64_t kRowAlignmentBytes = 16;

// Elements from row to row of `columns` elements.
inline int64_t padded_row(int64_t columns, DType dtype) {
  return round_up(columns * byte_size(dtype), kRowAlignmentBytes) / byte_size(dtype);
}

}  // namespace conclave::inline v0

// Says how far apart the rows of a matrix lie.
#pragma once

#include "conclave/tensor.h"

#include <cstdint>

namespace conclave::inline v0 {

// In elements. Views of rows that follow each other may leave their stride at 0.
inline int64_t row_stride(const ConstTensorView& matrix) {
  return matrix.row_stride != 0 ? matrix.row_stride : matrix.shape[1];
}

}  // namespace conclave::inline v0

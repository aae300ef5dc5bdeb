// Scales of rows of activations that are codes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::gemm {

// Rows hold the float32 values of their codes. Each row has its scales at the same place.
struct RowScales {
  const std::byte* first = nullptr;  // float32 scales of the first row; null: rows are plain
  int64_t width = 0;                 // neighbouring k that share one

  const float* of_row(int64_t row, int64_t row_bytes) const noexcept {
    return static_cast<const float*>(static_cast<const void*>(first + row * row_bytes));
  }
};

}  // namespace conclave::inline v0::gemm

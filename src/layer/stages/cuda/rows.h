// Rows of a chunk as kernels take them.
#pragma once

#include "core/row_stride.h"

#include "conclave/dtype.h"
#include "conclave/tensor.h"

#include <cstdint>

namespace conclave::inline v0 {

// The rows of a capture; null if the caller wants none.
template <class T>
T* capture(const TensorView& view) {
  return static_cast<T*>(view.data);
}

inline int64_t capture_stride(const TensorView& view) {
  return view.empty() ? 0 : row_stride(view);
}

// Rows of any float type, [T * rows_per_token, columns].
struct SourceRows {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t stride = 0;     // elements
  bool given = false;     // the caller's own, ready before the call's first launch
  bool is_ready = false;  // as the kernels read them
  // If above 1, row t * rows_per_token + s belongs to slot s alone.
  int64_t rows_per_token = 1;
  // Rows that are codes already have these: the scale of row r and group g of its columns lies at
  // r * scale_stride + g.
  const float* scales = nullptr;
  int64_t scale_stride = 0;

  bool are_codes() const { return scales != nullptr; }
};

inline SourceRows source_rows(const ConstTensorView& rows) {
  return {.data = rows.data, .dtype = rows.dtype, .stride = row_stride(rows), .given = true};
}

}  // namespace conclave::inline v0

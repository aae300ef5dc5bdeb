// Elements of an adapter's factors, as they are given and as they are kept.
#pragma once

#include "core/float_convert.h"
#include "core/row_stride.h"
#include "experts/adapters/pack.h"

#include "conclave/tensor.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace conclave::inline v0::experts {

inline float factor_at(const ConstTensorView& view, int64_t row, int64_t col) {
  const int64_t stride = row_stride(view);
  const auto* const at =
      static_cast<const std::byte*>(view.data) + (row * stride + col) * byte_size(view.dtype);
  if (view.dtype == DType::kF32) {
    float value;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  return view.dtype == DType::kF16 ? f16_to_float(bits) : bf16_to_float(bits);
}

// Exact where the type is the factor's own, or float32.
inline void store_factor(DType dtype, float value, std::byte* to) {
  if (dtype == DType::kF32) {
    std::memcpy(to, &value, sizeof(value));
    return;
  }
  const uint16_t bits = dtype == DType::kF16 ? float_to_f16(value) : float_to_bf16(value);
  std::memcpy(to, &bits, sizeof(bits));
}

// Gate and up of a fused matrix have one `a`: the same elements, not only the same first one.
inline bool share_rows(const MatrixFactors& first, const MatrixFactors& second) {
  return !first.empty() && first.a.data == second.a.data && first.a.dtype == second.a.dtype &&
         first.a.shape == second.a.shape && first.a.row_stride == second.a.row_stride &&
         first.scale == second.scale;
}

}  // namespace conclave::inline v0::experts

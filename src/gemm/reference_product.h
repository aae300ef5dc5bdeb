// The plain product that every kernel with float32 arithmetic equals bit for bit.
#pragma once

#include "gemm/packed_layout.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::gemm {

// out[i] = sum over k of x[k] * weight(k, first_column + i), i < num_columns: one fused
// multiply-add per k, ascending. x holds layout.k floats, then zeros up to a multiple of
// layout.group().
void reference_product(const PanelLayout& layout, const std::byte* panel, const float* x,
                       int64_t first_column, int64_t num_columns, float* out) noexcept;

}  // namespace conclave::inline v0::gemm

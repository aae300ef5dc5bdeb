// The plain product that every kernel with float32 arithmetic equals bit for bit.
#pragma once

#include "gemm/packed_layout.h"
#include "gemm/panel_order.h"
#include "gemm/row_scales.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::gemm {

// out[i] = sum over k of x[k] * weight(k, first_column + i), i < num_columns: one fused
// multiply-add per k, ascending. x holds layout.k floats, then zeros up to a multiple of
// layout.group().
void reference_product(const PanelLayout& layout, const std::byte* panel, const float* x,
                       int64_t first_column, int64_t num_columns, float* out) noexcept;

// The same of a panel of codes. x holds layout.k floats: plain values, or those of codes with the
// given scales, of one row.
//
// Plain values: fused multiply-adds with code * scale, or with code * scale - offset, rounded to
// float32 once; an order, if there is one, says which scale and offset a k has. Codes: partial sums
// of products of codes, which are exact, over the k that share both scales; each is multiplied with
// the row's scale, then with the weights', and added. Where there are offsets, each segment's,
// times the row's scale and the sum of its codes, is then taken off by a fused multiply-add.
void reference_coded_product(const PanelLayout& layout, const std::byte* panel, const float* x,
                             const RowScales& row_scales, const PanelOrder& order,
                             float* out) noexcept;

}  // namespace conclave::inline v0::gemm

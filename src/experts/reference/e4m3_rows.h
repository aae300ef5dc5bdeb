// Rows of e4m3 weights and of what they multiply, and the product of the two.
#pragma once

#include "quant/activation_rows.h"

#include "conclave/spec.h"
#include "conclave/tensor.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::experts {

// One weight row as packed: codes, zero padded to 16 bytes, a float32 scale for each `group_width`
// columns, and the bias.
struct E4m3RowLayout {
  int64_t cols = 0;
  int64_t group_width = 0;

  int64_t num_groups() const;
  size_t code_bytes() const;
  size_t bytes() const;
};
E4m3RowLayout e4m3_row_layout(const QuantSpec& quant, int64_t cols);

// Row `row` of a matrix, its scales [rows, groups] float32 and its bias [1, rows] or empty.
void pack_e4m3_row(const E4m3RowLayout& layout, const ConstTensorView& matrix,
                   const ConstTensorView& scales, const ConstTensorView& bias, int64_t row,
                   std::byte* packed);

// A row of activations as the kernel reads it: values of codes and their steps, or plain values.
struct ActivationRow {
  const float* values = nullptr;
  const float* scales = nullptr;  // null where rows stay as they are
};

// The packed row times an activation row, and the bias: partial sums of codes over columns that
// share both scales, each times its steps; over plain values fused multiply-adds with
// code * scale rounded to float32. Columns ascend.
float e4m3_product(const E4m3RowLayout& layout, const std::byte* packed, const ActivationRow& row,
                   int64_t scale_width);

}  // namespace conclave::inline v0::experts

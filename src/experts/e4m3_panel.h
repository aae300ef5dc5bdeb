// e4m3 weights as CPU kernels read them: panels of 64 rows, the codes of one column after another.
#pragma once

#include "conclave/spec.h"
#include "conclave/tensor.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::experts {

inline constexpr int64_t kE4m3PanelRows = 64;

// A panel: 64 codes for each column; 64 float32 scales for each group of columns; 64 biases. Rows
// beyond the end of the matrix are zeros.
struct E4m3PanelLayout {
  int64_t cols = 0;
  int64_t group_width = 1;  // columns that share a scale

  int64_t num_groups() const;
  size_t code_bytes() const;
  size_t bytes() const;  // a multiple of 64
};
E4m3PanelLayout e4m3_panel_layout(const QuantSpec& quant, int64_t cols);

// Rows [first, first + 64) of a matrix, their scales [rows, groups] float32 and bias [1, rows] or
// empty.
struct E4m3Rows {
  ConstTensorView matrix;
  ConstTensorView scales;
  ConstTensorView bias;
};
void pack_e4m3_panel(const E4m3PanelLayout& layout, const E4m3Rows& rows, int64_t first,
                     std::byte* panel);

// Rows of activations times a panel. Row r has its values at values + r * stride and, if rows are
// quantised, its scales at scales + r * stride, one per `scale_width` columns.
struct E4m3PanelTask {
  const E4m3PanelLayout& layout;
  const std::byte* panel = nullptr;
  const float* panel_scales = nullptr;  // [groups, 64], within the panel
  const float* panel_biases = nullptr;  // [64], likewise
  const float* values = nullptr;
  const float* scales = nullptr;  // null if rows are not quantised
  int64_t scale_width = 1;
  int64_t stride = 0;
  int64_t num_rows = 0;
  float* out = nullptr;  // [num_rows, 64]
};

// Points the task to `panel`, its scales and its biases.
void set_panel(const std::byte* panel, E4m3PanelTask& task);

// Each lane adds up (sum of products of codes) * row scale * weight scale over columns that share
// both scales; over plain values it uses fused multiply-adds with code * scale rounded to float32.
// Columns ascend; the bias is added last. All functions give the same bits.
using E4m3PanelFunction = void (*)(const E4m3PanelTask& task) noexcept;
void reference_e4m3_product(const E4m3PanelTask& task) noexcept;

}  // namespace conclave::inline v0::experts

#include "gemm/reference_product.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace conclave::inline v0::gemm {
namespace {

using Sums = std::array<float, static_cast<size_t>(kPanelColumns)>;

// The group of a k and column.
int64_t group_of(const PanelLayout& layout, const PanelOrder& order, int64_t k, int64_t column) {
  const int32_t* table = column < kPanelColumns / 2 ? order.lower : order.upper;
  return table != nullptr ? table[k] : layout.group_of(k);
}

void add_plain(const PanelLayout& layout, const std::byte* panel, const float* x,
               const PanelOrder& order, Sums& sums) {
  for (int64_t k = 0; k < layout.k; ++k) {
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      const int64_t group = group_of(layout, order, k, c);
      const float code = panel_value(layout, panel, k, c);
      const float scale = layout.scale(panel, group, c);
      const float weight = layout.has_offsets
                               ? std::fma(code, scale, -layout.offset(panel, group, c))
                               : code * scale;
      float& sum = sums[static_cast<size_t>(c)];
      sum = std::fma(x[k], weight, sum);
    }
  }
}

void add_coded(const PanelLayout& layout, const std::byte* panel, const float* x,
               const RowScales& row_scales, Sums& sums) {
  const float* row_scale = row_scales.of_row(0, 0);
  const WeightGroups groups = layout.groups();
  for (int64_t begin = 0; begin < layout.k;) {
    const int64_t end = segment_end(groups, row_scales, begin);
    Sums partial{};
    for (int64_t k = begin; k < end; ++k) {
      for (size_t c = 0; c < sums.size(); ++c) {
        const float code = panel_value(layout, panel, k, static_cast<int64_t>(c));
        partial[c] = std::fma(x[k], code, partial[c]);
      }
    }
    const int64_t group = layout.group_of(begin);
    for (size_t c = 0; c < sums.size(); ++c) {
      sums[c] += partial[c] * row_scale[begin / row_scales.width] *
                 layout.scale(panel, group, static_cast<int64_t>(c));
    }
    begin = end;
  }
}

// Takes what offsets take from the products of a row of codes.
void take_offsets(const PanelLayout& layout, const std::byte* panel, const float* x,
                  const RowScales& row_scales, Sums& sums) {
  const float* row_scale = row_scales.of_row(0, 0);
  const WeightGroups groups = layout.groups();
  for (int64_t begin = 0; begin < layout.k;) {
    const int64_t end = segment_end(groups, row_scales, begin);
    const float shift =
        row_scale[begin / row_scales.width] * std::accumulate(x + begin, x + end, 0.0F);
    const int64_t group = layout.group_of(begin);
    for (size_t c = 0; c < sums.size(); ++c) {
      const float offset = layout.offset(panel, group, static_cast<int64_t>(c));
      sums[c] = std::fma(-shift, offset, sums[c]);
    }
    begin = end;
  }
}

}  // namespace

void reference_product(const PanelLayout& layout, const std::byte* panel, const float* x,
                       int64_t first_column, int64_t num_columns, float* out) noexcept {
  const int64_t padded = round_up(layout.k, layout.group());
  for (int64_t i = 0; i < num_columns; ++i) {
    float sum = 0.0F;
    for (int64_t k = 0; k < padded; ++k) {
      sum = std::fma(x[k], panel_value(layout, panel, k, first_column + i), sum);
    }
    out[i] = sum;
  }
}

void reference_coded_product(const PanelLayout& layout, const std::byte* panel, const float* x,
                             const RowScales& row_scales, const PanelOrder& order,
                             float* out) noexcept {
  Sums sums{};
  if (row_scales.first == nullptr) {
    add_plain(layout, panel, x, order, sums);
  } else {
    add_coded(layout, panel, x, row_scales, sums);
    if (layout.has_offsets) take_offsets(layout, panel, x, row_scales, sums);
  }
  std::copy(sums.begin(), sums.end(), out);
}

}  // namespace conclave::inline v0::gemm

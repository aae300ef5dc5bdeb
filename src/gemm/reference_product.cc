#include "gemm/reference_product.h"

#include "gemm/panel_reader.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace conclave::inline v0::gemm {
namespace {

using Sums = std::array<float, static_cast<size_t>(kPanelColumns)>;

// The scales and offsets of the groups that a k belongs to: neighbouring k mostly share them.
class GroupNumbers {
 public:
  GroupNumbers(const PanelLayout& layout, const std::byte* panel, const PanelOrder& order)
      : layout_(layout), panel_(panel), tables_{order.lower, order.upper} {}

  void turn_to(int64_t k) {
    for (size_t half = 0; half < tables_.size(); ++half) {
      const int64_t group = tables_[half] != nullptr ? tables_[half][k] : layout_.group_of(k);
      if (group == groups_[half]) continue;
      groups_[half] = group;
      const int64_t first = static_cast<int64_t>(half) * kHalf;
      for (int64_t c = first; c < first + kHalf; ++c) {
        scales[static_cast<size_t>(c)] = layout_.scale(panel_, group, c);
        if (layout_.has_offsets) offsets[static_cast<size_t>(c)] = layout_.offset(panel_, group, c);
      }
    }
  }

  Sums scales{};
  Sums offsets{};

 private:
  static constexpr int64_t kHalf = kPanelColumns / 2;
  const PanelLayout& layout_;
  const std::byte* panel_;
  std::array<const int32_t*, 2> tables_;
  std::array<int64_t, 2> groups_ = {-1, -1};
};

void add_plain(const PanelLayout& layout, const std::byte* panel, const float* x,
               const PanelOrder& order, Sums& sums) {
  const PanelReader reader(layout, panel);
  GroupNumbers numbers(layout, panel, order);
  for (int64_t k = 0; k < layout.k; ++k) {
    Sums codes;
    reader.read(k, 0, kPanelColumns, codes.data());
    numbers.turn_to(k);
    for (size_t c = 0; c < sums.size(); ++c) {
      const float weight = layout.has_offsets
                               ? std::fma(codes[c], numbers.scales[c], -numbers.offsets[c])
                               : codes[c] * numbers.scales[c];
      sums[c] = std::fma(x[k], weight, sums[c]);
    }
  }
}

void add_coded(const PanelLayout& layout, const std::byte* panel, const float* x,
               const RowScales& row_scales, Sums& sums) {
  const PanelReader reader(layout, panel);
  const float* row_scale = row_scales.of_row(0, 0);
  const WeightGroups groups = layout.groups();
  for (int64_t begin = 0; begin < layout.k;) {
    const int64_t end = segment_end(groups, row_scales, begin);
    Sums partial{};
    for (int64_t k = begin; k < end; ++k) {
      Sums codes;
      reader.read(k, 0, kPanelColumns, codes.data());
      for (size_t c = 0; c < sums.size(); ++c) partial[c] = std::fma(x[k], codes[c], partial[c]);
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
  const PanelReader reader(layout, panel);
  const int64_t padded = round_up(layout.k, layout.group());
  Sums sums{};
  for (int64_t k = 0; k < padded; ++k) {
    Sums weights;
    reader.read(k, first_column, num_columns, weights.data());
    for (size_t i = 0; i < static_cast<size_t>(num_columns); ++i) {
      sums[i] = std::fma(x[k], weights[i], sums[i]);
    }
  }
  std::copy_n(sums.begin(), num_columns, out);
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

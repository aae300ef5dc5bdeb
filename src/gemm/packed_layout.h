// "panel64": the one layout of packed weights, which every CPU kernel reads.
//
// A matrix [columns, k] is cut into panels of 64 columns, each contiguous. A panel is a list of
// rows of 64 columns; a row holds one k (f32, f16) or a pair of neighbouring k (bf16), the pair of
// one column in one 32-bit lane, which suits widening to float32, dot products of pairs and tiles.
// Codes of half a byte share a byte with the code 32 columns on, which has the upper half. Of codes
// of 6 bits the lower four lie so, and the upper two of four columns share a byte behind them
// (SixBitRow). Weights that are codes are followed by their scales, 64 for each group of k, and
// some by as many offsets: a weight is code * scale - offset. How these numbers lie:
// gemm/panel_scales.h.
#pragma once

#include "core/checked.h"
#include "core/quant_spec.h"
#include "gemm/panel_scales.h"
#include "gemm/row_scales.h"

#include "conclave/dtype.h"
#include "conclave/spec.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace conclave::inline v0::gemm {

struct PanelLayout {
  DType dtype = DType::kBF16;
  int64_t k = 0;
  int64_t scale_width = 0;  // neighbouring k that share a scale; 0: weights without scales
  // k of the first group that lie before the panel, which begins inside a group if it is a slice.
  int64_t scale_skip = 0;
  bool has_offsets = false;  // offsets follow the scales, in their shape
  // The number of groups where a table says which one a k belongs to (PanelOrder); 0: groups are
  // neighbouring k.
  int64_t ordered_groups = 0;
  ScaleValues scale_values = ScaleValues::kFloat;
  ScaleValues offset_values = ScaleValues::kFloat;

  // Elements of k side by side in a panel row.
  int64_t group() const noexcept { return dtype == DType::kBF16 ? 2 : 1; }
  // k with the zeros at the end, because a tile instruction takes 32 bf16 values of k at once.
  int64_t padded_k() const noexcept { return dtype == DType::kBF16 ? round_up(k, 32) : k; }
  size_t row_bytes() const noexcept {
    return static_cast<size_t>(kPanelColumns * group() * bit_size(dtype) / 8);
  }
  size_t weight_bytes() const noexcept {
    return static_cast<size_t>(padded_k() * kPanelColumns * bit_size(dtype) / 8);
  }
  int64_t num_groups() const noexcept {
    if (ordered_groups != 0) return ordered_groups;
    return scale_width == 0 ? 0 : ceil_div(scale_skip + k, scale_width);
  }
  WeightGroups groups() const noexcept {
    return {.k = k, .width = scale_width, .skip = scale_skip};
  }
  int64_t group_of(int64_t of_k) const noexcept { return (scale_skip + of_k) / scale_width; }
  NumberPlane scale_plane() const noexcept { return plane_of(scale_values, num_groups()); }
  NumberPlane offset_plane() const noexcept {
    return plane_of(offset_values, has_offsets ? num_groups() : 0);
  }
  size_t scales_at() const noexcept { return weight_bytes(); }
  size_t offsets_at() const noexcept { return scales_at() + scale_plane().bytes(); }
  size_t panel_bytes() const noexcept { return offsets_at() + offset_plane().bytes(); }
  // One of the panel's scales, or offsets.
  float scale(const std::byte* panel, int64_t of_group, int64_t column) const noexcept {
    return number_at(scale_plane(), panel + scales_at(), of_group, column);
  }
  float offset(const std::byte* panel, int64_t of_group, int64_t column) const noexcept {
    return number_at(offset_plane(), panel + offsets_at(), of_group, column);
  }
  // All of them, [num_groups, 64], where they lie as float32; null if there are none.
  const float* scales(const std::byte* panel) const noexcept {
    return num_groups() != 0 ? floats(panel + scales_at()) : nullptr;
  }
  const float* offsets(const std::byte* panel) const noexcept {
    return has_offsets ? floats(panel + offsets_at()) : nullptr;
  }

 private:
  static const float* floats(const std::byte* first) noexcept {
    return static_cast<const float*>(static_cast<const void*>(first));
  }
  NumberPlane plane_of(ScaleValues values, int64_t groups) const noexcept {
    const bool in_steps = values == ScaleValues::kSteps;
    return {.values = values,
            .groups = groups,
            .unit_groups = in_steps ? kStepColumns / scale_width : 1};
  }
};

// A row of codes of 6 bits: where the upper two of a column lie. The columns that vectors of
// interleaved half bytes have in the same lane share a byte.
struct SixBitRow {
  static constexpr int64_t kUpperAt = kPanelColumns / 2;
  static constexpr int64_t byte_of(int64_t column) {
    return kUpperAt + column % 32 / 16 * 8 + column % 8;
  }
  static constexpr int64_t shift_of(int64_t column) {
    return column / 32 * 4 + column % 16 / 8 * 2;
  }
};

// "panel64.k2.v1"; the number after k is PanelLayout::group. Codes are named:
// "panel64.k1.F8_E4M3.v1", and so are offsets and groups with a table: "panel64.k1.I4.zeros.v1",
// "panel64.k1.I4.order.v1". Scales and offsets that are not float32 say what they are:
// "panel64.k1.I4.f16.zeros.steps.v1". `variant` says, before the version, what the owner of the
// panels adds to them.
std::string layout_name(const PanelLayout& layout, const std::string& variant = {});

// Source of each panel column: `k` dense elements of the layout's dtype, from any byte on. Null
// stands for a column of zeros.
using PanelColumns = std::array<const std::byte*, kPanelColumns>;

// Writes every byte of one panel, unless a scale or offset does not fit the layout: it returns one.
UnfitNumber pack_panel(const PanelLayout& layout, const PanelColumns& columns, std::byte* panel,
                       const PanelNumbers& scales = {}, const PanelNumbers& offsets = {});

// Elements of 64 columns, null for zeros, and the columns that will be asked for next, null for
// unknown ones, which are fetched meanwhile.
struct ColumnLanes {
  const std::byte* const* columns = nullptr;
  const std::byte* const* next = nullptr;
  int64_t element_bits = 0;  // 32 and 16: values; 8 and 4: codes
  int64_t count = 0;         // elements of a column
};
// Writes elements as rows of a panel, and returns how many: the caller writes the rest.
// gemm/cpu/transpose_lanes.h has some.
using TransposeFunction = int64_t (*)(const ColumnLanes& lanes, std::byte* panel) noexcept;

// The vector code of one instruction set that packs panels, null where there is none.
struct PackFunctions {
  TransposeFunction transpose = nullptr;
  NumbersFunction numbers = nullptr;
};

// Writes the bytes of pack_panel for weights that are values. `transpose` may be null.
void pack_values(const PanelLayout& layout, const PanelColumns& columns, const PanelColumns& next,
                 TransposeFunction transpose, std::byte* panel) noexcept;

// One weight, widened to float32, or the value of its code; for the scalar path and tests.
float panel_value(const PanelLayout& layout, const std::byte* panel, int64_t k,
                  int64_t column) noexcept;

}  // namespace conclave::inline v0::gemm

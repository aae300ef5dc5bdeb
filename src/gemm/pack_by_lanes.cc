#include "gemm/pack_by_lanes.h"

#include "core/code_bits.h"
#include "core/weight_types.h"

#include <cstring>

namespace conclave::inline v0::gemm {
namespace {

// The k from `first` on, one by one.
void pack_rest(const PanelLayout& layout, const PanelColumns& columns, int64_t first,
               std::byte* panel) {
  const int64_t bits = bit_size(layout.dtype);
  const int64_t row_columns = kPanelColumns * bits / 8;
  for (int64_t k = first; k < layout.k; ++k) {
    std::byte* const row = panel + static_cast<size_t>(k) * layout.row_bytes();
    std::memset(row, 0, layout.row_bytes());
    for (int64_t column = 0; column < kPanelColumns; ++column) {
      const std::byte* const source = columns[static_cast<size_t>(column)];
      if (source == nullptr) continue;
      const auto code = static_cast<uint32_t>(code_at(source, k, bits));
      const auto shift = static_cast<uint32_t>(column / row_columns * bits);
      row[column % row_columns] |= static_cast<std::byte>(code << shift);
    }
  }
}

void pack_codes(const PanelLayout& layout, const PanelColumns& columns, const PanelColumns& next,
                TransposeFunction transpose, std::byte* panel) {
  const int64_t taken = transpose({.columns = columns.data(),
                                   .next = next.data(),
                                   .element_bits = bit_size(layout.dtype),
                                   .count = layout.k},
                                  panel);
  pack_rest(layout, columns, taken, panel);
}

// Numbers that have no form are found once more, and named, by the code that has no vectors.
UnfitNumber pack_numbers_by_lanes(const NumberPlane& plane, const PanelNumbers& numbers,
                                  NumbersFunction function, std::byte* packed) {
  const bool is_done = function != nullptr && function(plane, numbers.data(), packed);
  return is_done ? UnfitNumber{} : pack_numbers(plane, numbers, packed);
}

}  // namespace

UnfitNumber pack_panel_by_lanes(const PanelLayout& layout, const PanelColumns& columns,
                                const PanelColumns& next, const PackFunctions& functions,
                                std::byte* panel, const PanelNumbers& scales,
                                const PanelNumbers& offsets) {
  const int64_t bits = is_plain(layout.dtype) ? 0 : bit_size(layout.dtype);
  const bool has_lanes = bits == 0 || bits == 4 || bits == 8;
  if (functions.transpose == nullptr || !has_lanes || layout.k == 0) {
    return pack_panel(layout, columns, panel, scales, offsets);
  }
  if (bits == 0) {
    pack_values(layout, columns, next, functions.transpose, panel);
  } else {
    pack_codes(layout, columns, next, functions.transpose, panel);
  }
  const UnfitNumber unfit = pack_numbers_by_lanes(layout.scale_plane(), scales, functions.numbers,
                                                  panel + layout.scales_at());
  if (unfit.column >= 0) return unfit;
  return pack_numbers_by_lanes(layout.offset_plane(), offsets, functions.numbers,
                               panel + layout.offsets_at());
}

}  // namespace conclave::inline v0::gemm

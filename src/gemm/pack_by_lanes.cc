#include "gemm/pack_by_lanes.h"

#include "core/code_bits.h"
#include "core/weight_types.h"

#include <algorithm>
#include <cstring>

namespace conclave::inline v0::gemm {
namespace {

constexpr int64_t kLaneBytes = 4;
// 8 KiB of transposed lanes stay in the first-level cache beside the columns they come from.
constexpr int64_t kBlockLanes = 32;

PanelColumns advanced(const PanelColumns& columns, int64_t bytes) {
  PanelColumns moved{};
  for (size_t column = 0; column < columns.size(); ++column) {
    moved[column] = columns[column] != nullptr ? columns[column] + bytes : nullptr;
  }
  return moved;
}

// Takes one byte of each column's lane. Bytes may alias anything, which loops into vectors do not
// bear.
void take_bytes(const uint32_t* __restrict lanes, int shift, uint8_t* __restrict bytes) {
  for (int64_t column = 0; column < kPanelColumns; ++column) {
    bytes[column] = static_cast<uint8_t>(lanes[column] >> shift);
  }
}

// A lane has four codes of a column, which become bytes of four panel rows.
void spread_bytes(const uint32_t* __restrict lanes, uint8_t* __restrict rows) {
  for (int byte = 0; byte < kLaneBytes; ++byte) {
    take_bytes(lanes, byte * 8, rows + byte * kPanelColumns);
  }
}

// A lane has eight codes of a column, which become halves of bytes in eight panel rows.
void spread_halves(const uint32_t* __restrict lanes, uint8_t* __restrict rows) {
  constexpr int64_t kHalf = kPanelColumns / 2;
  for (int byte = 0; byte < kLaneBytes; ++byte) {
    uint8_t pairs[kPanelColumns];
    take_bytes(lanes, byte * 8, pairs);
    uint8_t* const even = rows + byte * kPanelColumns;
    uint8_t* const odd = even + kHalf;
    for (int64_t column = 0; column < kHalf; ++column) {
      even[column] =
          static_cast<uint8_t>((pairs[column] & 0xfU) | uint32_t{pairs[column + kHalf]} << 4U);
      odd[column] =
          static_cast<uint8_t>(uint32_t{pairs[column]} >> 4U | (pairs[column + kHalf] & 0xf0U));
    }
  }
}

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
  const int64_t bits = bit_size(layout.dtype);
  const int64_t lane_codes = kLaneBytes * 8 / bits;
  const int64_t num_lanes = layout.k / lane_codes;
  alignas(64) uint32_t lanes[kBlockLanes * kPanelColumns];
  int64_t done = 0;
  PanelColumns block = columns;
  while (done < num_lanes) {
    const int64_t count = std::min(kBlockLanes, num_lanes - done);
    const bool is_last = done + count == num_lanes;
    const PanelColumns after = is_last ? next : advanced(block, count * kLaneBytes);
    const int64_t taken = transpose(
        {.columns = block.data(), .next = after.data(), .lane_bytes = kLaneBytes, .count = count},
        static_cast<std::byte*>(static_cast<void*>(lanes)));
    auto* rows = static_cast<uint8_t*>(static_cast<void*>(panel)) +
                 static_cast<size_t>(done * lane_codes) * layout.row_bytes();
    for (int64_t lane = 0; lane < taken; ++lane) {
      const uint32_t* const of_columns = lanes + lane * kPanelColumns;
      if (bits == 8) {
        spread_bytes(of_columns, rows);
      } else {
        spread_halves(of_columns, rows);
      }
      rows += kLaneBytes * kPanelColumns;
    }
    done += taken;
    if (taken < count) break;
    block = after;
  }
  pack_rest(layout, columns, done * lane_codes, panel);
}

}  // namespace

UnfitNumber pack_panel_by_lanes(const PanelLayout& layout, const PanelColumns& columns,
                                const PanelColumns& next, TransposeFunction transpose,
                                std::byte* panel, const PanelNumbers& scales,
                                const PanelNumbers& offsets) {
  const int64_t bits = is_plain(layout.dtype) ? 0 : bit_size(layout.dtype);
  const bool has_lanes = bits == 0 || bits == 4 || bits == 8;
  if (transpose == nullptr || !has_lanes || layout.k == 0) {
    return pack_panel(layout, columns, panel, scales, offsets);
  }
  if (bits == 0) {
    pack_values(layout, columns, next, transpose, panel);
  } else {
    pack_codes(layout, columns, next, transpose, panel);
  }
  const UnfitNumber unfit = pack_numbers(layout.scale_plane(), scales, panel + layout.scales_at());
  if (unfit.column >= 0) return unfit;
  return pack_numbers(layout.offset_plane(), offsets, panel + layout.offsets_at());
}

}  // namespace conclave::inline v0::gemm

#include "gemm/packed_layout.h"

#include "core/dcheck.h"
#include "core/float_convert.h"
#include "core/weight_types.h"
#include "quant/weight_format.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace conclave::inline v0::gemm {
namespace {

// Transposes blocks that fit the first-level cache: 64 bytes of each column at a time, written as
// `sizeof(Lane)`-byte lanes. Begins at lane `taken`.
template <class Lane>
void transpose_lanes(const PanelColumns& columns, int64_t num_lanes, std::byte* panel,
                     int64_t taken = 0) {
  constexpr int64_t kBlock = 64 / static_cast<int64_t>(sizeof(Lane));
  constexpr Lane kZeros[kBlock] = {};
  for (int64_t begin = taken; begin < num_lanes; begin += kBlock) {
    const int64_t count = std::min(kBlock, num_lanes - begin);
    std::byte* block = panel + static_cast<size_t>(begin * kPanelColumns) * sizeof(Lane);
    for (size_t column = 0; column < columns.size(); ++column) {
      const std::byte* source = columns[column];
      Lane lanes[kBlock];
      std::memcpy(lanes,
                  source != nullptr
                      ? source + static_cast<size_t>(begin) * sizeof(Lane)
                      : static_cast<const std::byte*>(static_cast<const void*>(kZeros)),
                  static_cast<size_t>(count) * sizeof(Lane));
      std::byte* target = block + column * sizeof(Lane);
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(target + static_cast<size_t>(i * kPanelColumns) * sizeof(Lane), &lanes[i],
                    sizeof(Lane));
      }
    }
  }
}

// Writes the last, odd k of bf16 columns and the zeros up to the padded k.
void pack_bf16_tail(const PanelLayout& layout, const PanelColumns& columns, std::byte* panel) {
  const int64_t pairs = layout.k / 2;
  std::byte* tail = panel + static_cast<size_t>(pairs) * layout.row_bytes();
  std::memset(tail, 0, layout.weight_bytes() - static_cast<size_t>(pairs) * layout.row_bytes());
  if (layout.k % 2 == 0) return;
  for (size_t column = 0; column < columns.size(); ++column) {
    if (columns[column] == nullptr) continue;
    std::memcpy(tail + column * 4, columns[column] + static_cast<size_t>(layout.k - 1) * 2, 2);
  }
}

// Codes of half a byte: two neighbouring k of a column become the halves of two bytes, one in each
// panel row.
void pack_halves(const PanelColumns& columns, int64_t k, std::byte* panel) {
  constexpr size_t kHalf = kPanelColumns / 2;
  constexpr std::byte kLow{0xf};
  for (int64_t pair = 0; pair < ceil_div(k, 2); ++pair) {
    std::byte* const even = panel + static_cast<size_t>(2 * pair) * kHalf;
    const bool has_odd = 2 * pair + 1 < k;
    for (size_t column = 0; column < kHalf; ++column) {
      const auto codes = [&](const std::byte* source) {
        return source != nullptr ? source[pair] : std::byte{0};
      };
      const std::byte first = codes(columns[column]);
      const std::byte second = codes(columns[column + kHalf]);
      even[column] = (first & kLow) | (second << 4);
      if (has_odd) even[column + kHalf] = (first >> 4) | (second & ~kLow);
    }
  }
}

// Codes of 6 bits: four neighbouring k of a column fill three bytes, and become a part of four
// panel rows.
void pack_sixes(const PanelColumns& columns, int64_t k, std::byte* panel) {
  constexpr int64_t kRowBytes = kPanelColumns * 6 / 8;
  std::memset(panel, 0, static_cast<size_t>(k * kRowBytes));
  for (int64_t first = 0; first < k; first += 4) {
    const int64_t count = std::min<int64_t>(4, k - first);
    const auto bytes = static_cast<size_t>(ceil_div(count * 6, 8));
    for (int64_t column = 0; column < kPanelColumns; ++column) {
      const std::byte* const source = columns[static_cast<size_t>(column)];
      if (source == nullptr) continue;
      uint32_t codes = 0;
      static_assert(std::endian::native == std::endian::little);
      std::memcpy(&codes, source + first * 6 / 8, bytes);
      std::byte* const half = panel + first * kRowBytes + column % 32;
      std::byte* const upper = panel + first * kRowBytes + SixBitRow::byte_of(column);
      const auto half_shift = static_cast<uint32_t>(column / 32 * 4);
      const auto upper_shift = static_cast<uint32_t>(SixBitRow::shift_of(column));
      for (int64_t i = 0; i < count; ++i, codes >>= 6) {
        half[i * kRowBytes] |= static_cast<std::byte>((codes & 0xfU) << half_shift);
        upper[i * kRowBytes] |= static_cast<std::byte>((codes >> 4 & 3U) << upper_shift);
      }
    }
  }
}

uint8_t panel_code(const PanelLayout& layout, const std::byte* panel, int64_t k, int64_t column) {
  const std::byte* row = panel + static_cast<size_t>(k) * layout.row_bytes();
  if (bit_size(layout.dtype) == 8) return static_cast<uint8_t>(row[column]);
  constexpr int64_t kHalf = kPanelColumns / 2;
  const auto pair = static_cast<uint8_t>(row[column % kHalf]);
  const auto half = static_cast<uint8_t>(column < kHalf ? pair & 0xfU : pair >> 4);
  if (bit_size(layout.dtype) == 4) return half;
  const auto upper = static_cast<uint32_t>(row[SixBitRow::byte_of(column)]);
  return static_cast<uint8_t>(half | (upper >> SixBitRow::shift_of(column) & 3U) << 4);
}

template <class T>
T load(const std::byte* element) {
  T value;
  std::memcpy(&value, element, sizeof(value));
  return value;
}

std::string_view name_of(ScaleValues values) {
  switch (values) {
    case ScaleValues::kF16:
      return ".f16";
    case ScaleValues::kPowerOfTwo:
      return ".e8m0";
    case ScaleValues::kSteps:
      return ".steps";
    case ScaleValues::kFloat8:
    case ScaleValues::kFloat:
      break;
  }
  return "";
}

void pack_weights(const PanelLayout& layout, const PanelColumns& columns, std::byte* panel) {
  if (is_plain(layout.dtype)) return pack_values(layout, columns, {}, nullptr, panel);
  if (bit_size(layout.dtype) == 4) return pack_halves(columns, layout.k, panel);
  if (bit_size(layout.dtype) == 6) return pack_sixes(columns, layout.k, panel);
  CONCLAVE_DCHECK(bit_size(layout.dtype) == 8);
  transpose_lanes<uint8_t>(columns, layout.k, panel);
}

}  // namespace

std::string layout_name(const PanelLayout& layout, const std::string& variant) {
  std::string codes;
  if (layout.scale_width != 0) codes = "." + std::string(to_string(layout.dtype));
  codes += name_of(layout.scale_values);
  if (layout.has_offsets) codes += ".zeros";
  codes += name_of(layout.offset_values);
  if (layout.ordered_groups != 0) codes += ".order";
  return "panel64.k" + std::to_string(layout.group()) + codes + variant + ".v1";
}

void pack_values(const PanelLayout& layout, const PanelColumns& columns, const PanelColumns& next,
                 TransposeFunction transpose, std::byte* panel) noexcept {
  const int64_t num_lanes = layout.k / layout.group();
  const int64_t lane_bits = layout.group() * bit_size(layout.dtype);
  const int64_t taken = transpose == nullptr ? 0
                                             : transpose({.columns = columns.data(),
                                                          .next = next.data(),
                                                          .element_bits = lane_bits,
                                                          .count = num_lanes},
                                                         panel);
  if (lane_bits == 16) {
    transpose_lanes<uint16_t>(columns, num_lanes, panel, taken);
  } else {
    transpose_lanes<uint32_t>(columns, num_lanes, panel, taken);
  }
  if (layout.group() == 2) pack_bf16_tail(layout, columns, panel);
}

UnfitNumber pack_panel(const PanelLayout& layout, const PanelColumns& columns, std::byte* panel,
                       const PanelNumbers& scales, const PanelNumbers& offsets) {
  if (layout.k == 0) return {};  // no bytes, and perhaps no memory
  pack_weights(layout, columns, panel);
  const UnfitNumber unfit = pack_numbers(layout.scale_plane(), scales, panel + layout.scales_at());
  if (unfit.column >= 0) return unfit;
  return pack_numbers(layout.offset_plane(), offsets, panel + layout.offsets_at());
}

float panel_value(const PanelLayout& layout, const std::byte* panel, int64_t k,
                  int64_t column) noexcept {
  if (!is_plain(layout.dtype)) {
    return quant::panel_format_of(layout.dtype).codes->decode(panel_code(layout, panel, k, column));
  }
  const int64_t group = layout.group();
  const int64_t index = ((k / group) * kPanelColumns + column) * group + k % group;
  const std::byte* element = panel + index * byte_size(layout.dtype);
  if (layout.dtype == DType::kF32) return load<float>(element);
  const auto bits = load<uint16_t>(element);
  return layout.dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

}  // namespace conclave::inline v0::gemm

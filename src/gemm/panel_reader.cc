#include "gemm/panel_reader.h"

#include "core/float_convert.h"
#include "core/weight_types.h"
#include "quant/weight_format.h"

#include <cstring>

namespace conclave::inline v0::gemm {
namespace {

template <int64_t kBits>
uint8_t code_at(const std::byte* row, int64_t column) {
  if constexpr (kBits == 8) return static_cast<uint8_t>(row[column]);
  constexpr int64_t kHalf = kPanelColumns / 2;
  const auto pair = static_cast<uint8_t>(row[column % kHalf]);
  const auto half = static_cast<uint8_t>(column < kHalf ? pair & 0xfU : pair >> 4);
  if constexpr (kBits == 4) return half;
  const auto upper = static_cast<uint32_t>(row[SixBitRow::byte_of(column)]);
  return static_cast<uint8_t>(half | (upper >> SixBitRow::shift_of(column) & 3U) << 4);
}

}  // namespace

PanelReader::PanelReader(const PanelLayout& layout, const std::byte* panel) noexcept
    : dtype_(layout.dtype),
      bits_(bit_size(layout.dtype)),
      group_(layout.group()),
      row_bytes_(layout.row_bytes()),
      panel_(panel) {
  if (is_plain(dtype_)) return;
  const auto& codes = *quant::panel_format_of(dtype_).codes;
  for (size_t code = 0; code < size_t{1} << bits_; ++code) {
    value_of_[code] = codes.decode(static_cast<uint8_t>(code));
  }
}

void PanelReader::read(int64_t k, int64_t first, int64_t count, float* values) const noexcept {
  switch (dtype_) {
    case DType::kF32:
      return read_plain<float>(
          k, first, count, [](float value) { return value; }, values);
    case DType::kF16:
      return read_plain<uint16_t>(k, first, count, f16_to_float, values);
    case DType::kBF16:
      return read_plain<uint16_t>(k, first, count, bf16_to_float, values);
    default:
      if (bits_ == 8) return read_codes<8>(k, first, count, values);
      if (bits_ == 6) return read_codes<6>(k, first, count, values);
      return read_codes<4>(k, first, count, values);
  }
}

template <class T, class Widen>
void PanelReader::read_plain(int64_t k, int64_t first, int64_t count, Widen widen,
                             float* values) const noexcept {
  const std::byte* const row = panel_ + static_cast<size_t>(k / group_) * row_bytes_;
  for (int64_t i = 0; i < count; ++i) {
    T element;
    std::memcpy(&element, row + static_cast<size_t>((first + i) * group_ + k % group_) * sizeof(T),
                sizeof(T));
    values[i] = widen(element);
  }
}

template <int64_t kBits>
void PanelReader::read_codes(int64_t k, int64_t first, int64_t count,
                             float* values) const noexcept {
  const std::byte* const row = panel_ + static_cast<size_t>(k) * row_bytes_;
  for (int64_t i = 0; i < count; ++i) values[i] = value_of_[code_at<kBits>(row, first + i)];
}

}  // namespace conclave::inline v0::gemm

#include "layer/known_codes.h"

#include "core/code_bits.h"
#include "core/located.h"
#include "core/row_stride.h"
#include "core/weight_types.h"
#include "quant/weight_format.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr uint8_t kNone = 0x80;

// Writes the codes of a row side by side, and returns their bits, kNone among them, in one.
template <int kBits, int kStoredBits = 8>
uint8_t narrow_row(const std::array<uint8_t, 256>& codes, const std::byte* in, int64_t cols,
                   std::byte* out) {
  constexpr int64_t kTogether = kBits == 4 ? 2 : 4;
  constexpr size_t kBytes = kTogether * kBits / 8;
  static_assert(std::endian::native == std::endian::little);
  uint8_t seen = 0;
  const auto pack = [&](int64_t col, int64_t count) {
    uint32_t packed = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t code = codes[code_at(in, col + i, kStoredBits)];
      seen |= code;
      packed |= (code & ((1U << kBits) - 1)) << (i * kBits);
    }
    return packed;
  };
  int64_t col = 0;
  for (; col + kTogether <= cols; col += kTogether, out += kBytes) {
    const uint32_t packed = pack(col, kTogether);
    std::memcpy(out, &packed, kBytes);
  }
  const uint32_t rest = pack(col, cols - col);
  std::memcpy(out, &rest, static_cast<size_t>(ceil_div((cols - col) * kBits, 8)));
  return seen;
}

[[noreturn]] void refuse(const BlockOfMatrix& place, WeightPlane plane, std::string expected,
                         std::string found) {
  throw Error(ErrorCode::kTensorValue,
              located(place.source.locate(place.id.with(plane), place.expert),
                      {.what = "codes are not what MoeSpec.quant says is known of them",
                       .expected = std::move(expected),
                       .found = std::move(found)}));
}

// Keeps the first of the numbers of neighbouring groups that are to be equal. `groups` is the
// number of them in a row, `first` the place of a row's first one among all, `width` how many share
// a number.
struct SharedNumbers {
  int64_t groups = 0;
  int64_t first = 0;
  int64_t width = 1;

  int64_t place(int64_t group) const { return (first + group) / width - first / width; }
  int64_t count() const { return groups == 0 ? 0 : place(groups - 1) + 1; }

  // Null, or the first number that differs from those it should share a value with.
  const float* merge(std::vector<float>& numbers) const {
    const int64_t rows = groups == 0 ? 0 : static_cast<int64_t>(numbers.size()) / groups;
    std::vector<float> merged(static_cast<size_t>(rows * count()));
    for (int64_t row = 0; row < rows; ++row) {
      const float* const own = numbers.data() + row * groups;
      float* const out = merged.data() + row * count();
      for (int64_t group = 0; group < groups; ++group) {
        const bool is_first = group == 0 || place(group) != place(group - 1);
        if (is_first) out[place(group)] = own[group];
        if (own[group] != out[place(group)]) return own + group;
      }
    }
    numbers = std::move(merged);
    return nullptr;
  }
};

}  // namespace

KnownCodes::KnownCodes(DType dtype, const QuantSpec& layer, WeightMatrix matrix)
    : dtype_(dtype),
      layer_(layer),
      known_(matrix == WeightMatrix::kDown ? layer.down_codes : layer.gate_up_codes) {
  if (!known_.dtype) return;
  const quant::CodeBook& wide = *quant::format_of(dtype_).codes;
  const quant::CodeBook& narrow = *quant::known_format_of(*known_.dtype).codes;
  for (size_t code = 0; code < codes_.size(); ++code) {
    const float value = wide.decode(static_cast<uint8_t>(code));
    const uint8_t found = narrow.encode(value);
    codes_[code] = narrow.decode(found) == value ? found : kNone;
  }
}

KnownCodes::NarrowRow KnownCodes::row_narrower(int64_t stored_bits) const {
  switch (bit_size(*known_.dtype)) {
    case 2:
      return stored_bits == 4 ? narrow_row<2, 4> : narrow_row<2>;
    case 4:
      return narrow_row<4>;
    default:
      return narrow_row<6>;
  }
}

ConstTensorView KnownCodes::narrow(const ConstTensorView& codes, const BlockOfMatrix& place,
                                   std::vector<std::byte>& storage) const {
  const int64_t rows = codes.shape[0];
  const int64_t cols = codes.shape[1];
  const int64_t pitch = packed_bytes(codes.dtype, row_stride(codes));
  const int64_t stored_bits = bit_size(codes.dtype);
  const int64_t row_bytes = packed_bytes(*known_.dtype, cols);
  storage.resize(static_cast<size_t>(rows * row_bytes));
  for (int64_t row = 0; row < rows; ++row) {
    const auto* const in = static_cast<const std::byte*>(codes.data) + row * pitch;
    std::byte* const out = storage.data() + row * row_bytes;
    const uint8_t seen = row_narrower(stored_bits)(codes_, in, cols, out);
    if ((seen & kNone) == 0) continue;
    int64_t other = 0;
    while (codes_[code_at(in, other, stored_bits)] != kNone) ++other;
    refuse(place, WeightPlane::kWeights, fmt::format("values of {}", to_string(*known_.dtype)),
           fmt::format("{:g} in row {}, column {}",
                       quant::format_of(dtype_).codes->decode(code_at(in, other, stored_bits)),
                       place.block.row_begin + row, place.block.col_begin + other));
  }
  return {.data = storage.data(), .dtype = *known_.dtype, .shape = codes.shape};
}

void KnownCodes::narrow(const BlockOfMatrix& place, CodeMeaning& meaning) const {
  if (!known_.has_zeros) {
    const auto other = std::ranges::find_if(meaning.offsets, [](float zero) { return zero != 0; });
    if (other != meaning.offsets.end()) {
      refuse(place, WeightPlane::kZero, "no zeros but 0", fmt::format("{}", *other));
    }
    meaning.offsets.clear();
  }
  if (!has_wider_groups()) return;
  const SharedNumbers shared{.groups = meaning.groups,
                             .first = place.block.col_begin / layer_.block_cols,
                             .width = known_.block_cols / layer_.block_cols};
  const auto merge = [&](std::vector<float>& numbers, WeightPlane plane) {
    const float* const other = shared.merge(numbers);
    if (other == nullptr) return;
    refuse(place, plane, fmt::format("one for {} neighbouring columns", known_.block_cols),
           fmt::format("another, {}, among them", *other));
  };
  merge(meaning.scales, WeightPlane::kScale);
  merge(meaning.offsets, WeightPlane::kZero);
  meaning.groups = shared.count();
}

}  // namespace conclave::inline v0

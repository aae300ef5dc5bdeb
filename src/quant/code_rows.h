// Rows of a format's codes, as core/code_bits.h lays them, in the table of formats.
#pragma once

#include "core/code_bits.h"
#include "quant/code_values.h"
#include "quant/weight_format.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::quant {

// The values of all codes of a byte: a look-up takes less than taking a float apart.
template <class Format>
inline constexpr auto kByteValues = [] {
  std::array<float, 256> values{};
  for (size_t code = 0; code < values.size(); ++code) {
    values[code] = Format::decode(static_cast<uint8_t>(code));
  }
  return values;
}();

template <class Format>
void decode_codes(const std::byte* row, int64_t begin, int64_t count, float* values) {
  if constexpr (Format::kBits == 8) {
    for (int64_t i = 0; i < count; ++i) {
      values[i] = kByteValues<Format>[static_cast<uint8_t>(row[begin + i])];
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    values[i] = Format::decode(code_at(row, begin + i, Format::kBits));
  }
}

// Codes of many values come first: where encoding has no branch, that loop is one of vectors.
template <class Format>
void encode_codes(const float* values, int64_t begin, int64_t count, std::byte* row) {
  constexpr int64_t kAtOnce = 64;
  uint8_t codes[kAtOnce];
  for (int64_t first = 0; first < count; first += kAtOnce) {
    const int64_t some = std::min(kAtOnce, count - first);
    for (int64_t i = 0; i < some; ++i) codes[i] = Format::encode(values[first + i]);
    set_codes(row, begin + first, some, Format::kBits, codes);
  }
}

template <class Format>
consteval std::optional<int> mantissa_bits() {
  if constexpr (requires { Format::kMantissaBits; }) return Format::kMantissaBits;
  return std::nullopt;
}

template <class Format>
inline constexpr CodeBook kCodeBook = {.element = Format::kElement,
                                       .largest = Format::kLargest,
                                       .has_nan = Format::kHasNan,
                                       .exact_in_bf16 = exact_in_bf16<Format>(),
                                       .bf16_multiplier = bf16_multiplier<Format>(),
                                       .whole = whole_codes<Format>(),
                                       .mantissa_bits = mantissa_bits<Format>(),
                                       .decode = Format::decode,
                                       .encode = Format::encode};

template <class Format>
constexpr WeightFormat coded_row() {
  return {.name = Format::kName,
          .element = Format::kElement,
          .decode = decode_codes<Format>,
          .encode = encode_codes<Format>,
          .codes = &kCodeBook<Format>,
          .row_codes = &kCodeBook<typename Format::Rows>,
          .takes = Format::takes,
          .compressed_tensors = Format::kCompressedTensors,
          .forms = Format::kForms};
}

}  // namespace conclave::inline v0::quant

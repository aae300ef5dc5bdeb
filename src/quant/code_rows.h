// Rows of codes of 4 or 8 bits, side by side: code i is at bit i * bits, the lowest bit first.
#pragma once

#include "core/code_bits.h"
#include "quant/weight_format.h"

namespace conclave::inline v0::quant {

template <class Format>
void decode_codes(const std::byte* row, int64_t begin, int64_t count, float* values) {
  for (int64_t i = 0; i < count; ++i) {
    values[i] = Format::decode(code_at(row, begin + i, bit_size(Format::kElement)));
  }
}

template <class Format>
void encode_codes(const float* values, int64_t begin, int64_t count, std::byte* row) {
  for (int64_t i = 0; i < count; ++i) {
    set_code(row, begin + i, bit_size(Format::kElement), Format::encode(values[i]));
  }
}

template <class Format>
inline constexpr CodeBook kCodeBook = {.element = Format::kElement,
                                       .largest = Format::kLargest,
                                       .has_nan = Format::kHasNan,
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

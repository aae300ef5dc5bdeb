// Codec for formats without scales: one code per element, each converted on its own.
#pragma once

#include "quant/weight_format.h"

#include <cstring>

namespace conclave::inline v0::quant {

// `Codec` has `Code`, `static float decode(Code)` and `static Code encode(float)`.
template <class Codec>
void decode_plain(const EncodedRow& row, int64_t begin, int64_t count, float* values) {
  using Code = typename Codec::Code;
  const std::byte* codes = row.codes + static_cast<size_t>(begin) * sizeof(Code);
  for (int64_t i = 0; i < count; ++i) {
    Code code;
    std::memcpy(&code, codes + static_cast<size_t>(i) * sizeof(Code), sizeof(Code));
    values[i] = Codec::decode(code);
  }
}

template <class Codec>
void encode_plain(const float* values, int64_t begin, int64_t count, const MutableEncodedRow& row) {
  using Code = typename Codec::Code;
  std::byte* codes = row.codes + static_cast<size_t>(begin) * sizeof(Code);
  for (int64_t i = 0; i < count; ++i) {
    const Code code = Codec::encode(values[i]);
    std::memcpy(codes + static_cast<size_t>(i) * sizeof(Code), &code, sizeof(Code));
  }
}

template <class Codec>
constexpr WeightFormat plain_row(std::string_view name, DType element) {
  return {.name = name,
          .element = element,
          .group = {},
          .decode = decode_plain<Codec>,
          .encode = encode_plain<Codec>};
}

}  // namespace conclave::inline v0::quant

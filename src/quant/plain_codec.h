// Rows of values of whole bytes, each converted on its own.
#pragma once

#include "quant/weight_format.h"

#include <cstring>

namespace conclave::inline v0::quant {

// `Codec` has `Code`, `static float decode(Code)` and `static Code encode(float)`.
template <class Codec>
void decode_plain(const std::byte* row, int64_t begin, int64_t count, float* values) {
  using Code = typename Codec::Code;
  row += static_cast<size_t>(begin) * sizeof(Code);
  for (int64_t i = 0; i < count; ++i) {
    Code code;
    std::memcpy(&code, row + static_cast<size_t>(i) * sizeof(Code), sizeof(Code));
    values[i] = Codec::decode(code);
  }
}

template <class Codec>
void encode_plain(const float* values, int64_t begin, int64_t count, std::byte* row) {
  using Code = typename Codec::Code;
  row += static_cast<size_t>(begin) * sizeof(Code);
  for (int64_t i = 0; i < count; ++i) {
    const Code code = Codec::encode(values[i]);
    std::memcpy(row + static_cast<size_t>(i) * sizeof(Code), &code, sizeof(Code));
  }
}

template <class Codec>
inline constexpr WeightForm kPlainForm = {.name = Codec::kName, .dtype = Codec::kElement};

template <class Codec>
constexpr WeightFormat plain_row() {
  return {.name = Codec::kName,
          .element = Codec::kElement,
          .decode = decode_plain<Codec>,
          .encode = encode_plain<Codec>,
          .forms = {&kPlainForm<Codec>, 1}};
}

}  // namespace conclave::inline v0::quant

// The seam between stored weights and the kernels: how a format's codes become float32 and back.
#pragma once

#include "core/catalog.h"

#include "conclave/dtype.h"
#include "conclave/error.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace conclave::inline v0::quant {

// Rows x columns of a matrix that share one scale. {0, 0}: the format has no scales.
struct GroupShape {
  int64_t rows = 0;
  int64_t cols = 0;
  friend constexpr bool operator==(const GroupShape&, const GroupShape&) = default;
};

// One row of a stored matrix. `scales` is the row's first scale, null without scales.
struct EncodedRow {
  const std::byte* codes = nullptr;
  const std::byte* scales = nullptr;
};
struct MutableEncodedRow {
  std::byte* codes = nullptr;
  std::byte* scales = nullptr;
};

// A row of the format table. Adding one: docs/adding-a-format.md.
struct WeightFormat {
  std::string_view name;  // "bf16"
  DType element;          // of one code
  GroupShape group;
  // Columns [begin, begin + count) of a row as float32, each the exact value of its code and scale
  // where float32 holds it. `begin` is a multiple of max(1, group.cols). Codes need no alignment.
  void (*decode)(const EncodedRow& row, int64_t begin, int64_t count, float* values);
  // The inverse: each value becomes the nearest code, ties to even; NaN stays NaN.
  void (*encode)(const float* values, int64_t begin, int64_t count, const MutableEncodedRow& row);
};

// All formats; `find` takes names that came from outside.
Catalog<WeightFormat> format_catalog();
// Without a scale, an element type is a format of its own. Throws Error(kDType) listing the types
// that are.
const WeightFormat& plain_format(DType element);
// Bytes of the codes of `cols` columns. Throws Error(kSizeOverflow), or Error(kShape) where codes
// below a byte do not fill whole bytes.
size_t row_bytes(const WeightFormat& format, int64_t cols);

}  // namespace conclave::inline v0::quant

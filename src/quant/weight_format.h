// The seam between stored weights and the kernels: how a format's codes become float32 and back.
#pragma once

#include "core/catalog.h"

#include "conclave/dtype.h"
#include "conclave/error.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace conclave::inline v0::quant {

// Rows x columns of a matrix that share one scale. {0, 0} means that the format has no scales.
struct GroupShape {
  int64_t rows = 0;
  int64_t cols = 0;
  friend constexpr bool operator==(const GroupShape&, const GroupShape&) = default;
};

// One row of a stored matrix. `scales` points to the row's first scale, null if there are none.
struct EncodedRow {
  const std::byte* codes = nullptr;
  const std::byte* scales = nullptr;
};
struct MutableEncodedRow {
  std::byte* codes = nullptr;
  std::byte* scales = nullptr;
};

// A row of the format table. docs/adding-a-format.md says how to add one.
struct WeightFormat {
  std::string_view name;  // "bf16"
  DType element;          // the type of one code
  GroupShape group;
  // Decodes columns [begin, begin + count) of a row to float32; each value is exactly code times
  // scale if float32 holds it. `begin` is a multiple of max(1, group.cols). Codes need no
  // alignment.
  void (*decode)(const EncodedRow& row, int64_t begin, int64_t count, float* values);
  // The inverse: each value becomes the nearest code, ties to even; NaN stays NaN.
  void (*encode)(const float* values, int64_t begin, int64_t count, const MutableEncodedRow& row);
};

// All formats; `find` takes names that come from outside.
Catalog<WeightFormat> format_catalog();
// The format without scales for this element type. Throws Error(kDType) listing the types that have
// one.
const WeightFormat& plain_format(DType element);
// Bytes that the codes of `cols` columns take. Throws Error(kSizeOverflow), or Error(kShape) if
// codes smaller than a byte do not fill whole bytes.
size_t row_bytes(const WeightFormat& format, int64_t cols);

}  // namespace conclave::inline v0::quant

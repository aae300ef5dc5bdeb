// A source converts the rows of a GGUF tensor to rows of a matrix, or reads them as they are.
#pragma once

#include "io/gguf/types.h"
#include "quant/gguf/block_type.h"

#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace conclave::inline v0::checkpoint {

// The type of a plain tensor: kF32, kF16, kBF16, kI32, kI64; nothing for blocks and others.
std::optional<DType> plain_type(const io::GgufType& type);
// The type of a tensor of such values; null for others.
const io::GgufType* gguf_type_of(DType dtype);

// One read has one of its own.
class RowReader {
 public:
  virtual ~RowReader() = default;
  // Writes columns, or groups of columns, [begin, end) to `out`, which has no alignment.
  virtual void read(const std::byte* row, int64_t begin, int64_t end, std::byte* out) = 0;
};

// Values stay as they are.
std::unique_ptr<RowReader> same_rows(DType dtype);
// Values or blocks become float32, times a factor.
std::unique_ptr<RowReader> float_rows(const io::GgufType& type, float factor);
// Whether codes of these blocks can be kI4 or, if none is below 0, kU4.
bool fits_4_bits(const quant::BlockType& type);
// Whether a format's codes have the outermost codes of these blocks as their values.
bool holds_codes(DType codes, const quant::BlockType& type);
// Codes become less by 8, and offsets by 8 scales, where they do not though blocks fit 4 bits.
bool lowers_codes(DType codes, const quant::BlockType& type);
// Blocks become codes: kI8, kI4, kU4, or the element of their type.
std::unique_ptr<RowReader> code_rows(const quant::BlockType& type, DType dtype);
// Blocks become scales, one for each `group` columns, times a factor.
std::unique_ptr<RowReader> scale_rows(const quant::BlockType& type, DType codes, int64_t group,
                                      float factor);
// Blocks become the offsets of such codes likewise; zeros for types that have none.
std::unique_ptr<RowReader> offset_rows(const quant::BlockType& type, DType codes, int64_t group,
                                       float factor);

}  // namespace conclave::inline v0::checkpoint

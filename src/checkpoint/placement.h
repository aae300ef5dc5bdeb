// Locates a matrix in its tensor, for every layout that a family may store.
#pragma once

#include "checkpoint/name_pattern.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

// The content of a tensor: `count` blocks (experts, shared experts or one) of `rows` x `cols`;
// several matrices may share the rows. A vector is a block with one column.
struct TensorBlock {
  int64_t count = 1;
  int64_t rows = 0;
  int64_t cols = 0;
  bool is_stack = false;  // the blocks have an axis
  bool is_vector = false;
  int64_t surplus = 0;  // meaningless blocks that the stack may hold beyond `count`
};

// The shapes in which a tensor may hold the block; the usual one comes first.
std::vector<std::vector<int64_t>> accepted_shapes(const TensorBlock& block,
                                                  const NamePattern& pattern, AxisOrder axes);

// Whether the shape is one of accepted_shapes for that order of axes (kRowsFirst or kColsFirst).
bool fits(std::span<const int64_t> shape, const TensorBlock& block, const NamePattern& pattern,
          AxisOrder axes);

// Element (row, col) of the matrix is element offset + row * row_stride + col * col_stride of the
// tensor, or of the plane that is read from it.
struct MatrixLocation {
  int32_t tensor = -1;  // index into TensorTable::tensors; -1: not found
  int64_t offset = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
  int32_t reading = -1;  // index into LayerMap::readings: the elements are those that it gives
  std::optional<DType> type = std::nullopt;  // where its elements have another than the tensor says
};

// The share of one matrix: it is number `part` of the `parts` matrices in the block, and
// `rows_before` rows of the block precede its own. `index` is the expert.
struct TensorShare {
  int64_t index = 0;
  int64_t part = 0;
  int64_t parts = 1;
  int64_t rows_before = 0;
};
MatrixLocation locate(const TensorBlock& block, const NamePattern& pattern, AxisOrder axes,
                      const TensorShare& share, int32_t tensor);

}  // namespace conclave::inline v0::checkpoint

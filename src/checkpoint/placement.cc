#include "checkpoint/placement.h"

#include <algorithm>

namespace conclave::inline v0::checkpoint {
namespace {

using Shape = std::vector<int64_t>;

void add_vector_shapes(const TensorBlock& block, const NamePattern& pattern,
                       std::vector<Shape>& shapes) {
  const int64_t n = block.rows;
  if (block.is_stack) {
    shapes.push_back({block.count, n});
    shapes.push_back({block.count, 1, n});
    return;
  }
  if (pattern.rows_beside > 1) {
    shapes.push_back({pattern.rows_beside, n});
    return;
  }
  shapes.push_back({n});
  shapes.push_back({1, n});
  if (n == 1) shapes.push_back({});
}

// The number of axes must be that of the name's form, except for a single row: another number means
// a tensor other than the one that was meant.
void add_matrix_shapes(const TensorBlock& block, const NamePattern& pattern, int64_t first,
                       int64_t second, std::vector<Shape>& shapes) {
  if (!block.is_stack) {
    shapes.push_back({first, second});
    if (first == 1) shapes.push_back({second});
    return;
  }
  if (pattern.experts == ExpertAxis::kMerged) {
    shapes.push_back({block.count * first, second});
    return;
  }
  shapes.push_back({block.count, first, second});
  if (block.surplus > 0) shapes.push_back({block.count + block.surplus, first, second});
}

}  // namespace

std::vector<Shape> accepted_shapes(const TensorBlock& block, const NamePattern& pattern,
                                   AxisOrder axes) {
  std::vector<Shape> shapes;
  if (block.is_vector) {
    if (axes != AxisOrder::kColsFirst) add_vector_shapes(block, pattern, shapes);
    return shapes;
  }
  if (axes != AxisOrder::kColsFirst)
    add_matrix_shapes(block, pattern, block.rows, block.cols, shapes);
  if (axes != AxisOrder::kRowsFirst)
    add_matrix_shapes(block, pattern, block.cols, block.rows, shapes);
  return shapes;
}

bool fits(std::span<const int64_t> shape, const TensorBlock& block, const NamePattern& pattern,
          AxisOrder axes) {
  const std::vector<Shape> shapes = accepted_shapes(block, pattern, axes);
  return std::any_of(shapes.begin(), shapes.end(), [&](const Shape& accepted) {
    return std::equal(shape.begin(), shape.end(), accepted.begin(), accepted.end());
  });
}

MatrixLocation locate(const TensorBlock& block, const NamePattern& pattern, AxisOrder axes,
                      const TensorShare& share, int32_t tensor) {
  const bool interleaved = pattern.rows == RowOrder::kInterleaved && share.parts > 1;
  const int64_t first_row = interleaved ? share.part : share.rows_before;
  const int64_t step = interleaved ? share.parts : 1;
  const bool rows_first = axes != AxisOrder::kColsFirst;
  const int64_t row_stride = rows_first ? block.cols : 1;
  const MatrixLocation matrix{
      .tensor = tensor,
      .offset = share.index * block.rows * block.cols + first_row * row_stride,
      .row_stride = step * row_stride,
      .col_stride = rows_first ? 1 : block.rows};
  if (!block.is_vector) return matrix;
  // The vector's entries are the columns of a single row.
  return {.tensor = tensor,
          .offset = matrix.offset + pattern.row * block.rows,
          .row_stride = block.rows,
          .col_stride = matrix.row_stride};
}

}  // namespace conclave::inline v0::checkpoint

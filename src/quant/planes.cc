#include "quant/planes.h"

#include "core/checked.h"
#include "core/dcheck.h"
#include "core/quant_spec.h"
#include "core/weight_types.h"

#include <algorithm>

namespace conclave::inline v0::quant {
namespace {

PlaneShape single(WeightPlane plane, int64_t rows, int64_t cols) {
  return {.plane = plane,
          .rows = 1,
          .cols = 1,
          .block_rows = std::max<int64_t>(rows, 1),
          .block_cols = std::max<int64_t>(cols, 1),
          .type = PlaneType::kScale,
          .is_single = true};
}

PlaneShape in_blocks(WeightPlane plane, int64_t rows, int64_t cols, int64_t block_rows,
                     int64_t block_cols) {
  return {.plane = plane,
          .rows = ceil_div(rows, block_rows),
          .cols = ceil_div(cols, block_cols),
          .block_rows = block_rows,
          .block_cols = block_cols,
          .type = PlaneType::kScale};
}

PlaneShape by_column(WeightPlane plane, int64_t rows, int64_t cols, PlaneType type) {
  return {.plane = plane,
          .rows = 1,
          .cols = cols,
          .block_rows = std::max<int64_t>(rows, 1),
          .type = type};
}

PlaneShape scale_of(const QuantSpec& quant, int64_t rows, int64_t cols) {
  switch (quant.weights) {
    case WeightScale::kChannel:
      return in_blocks(WeightPlane::kScale, rows, cols, 1, std::max<int64_t>(cols, 1));
    case WeightScale::kBlock:
      return in_blocks(WeightPlane::kScale, rows, cols, quant.block_rows, quant.block_cols);
    case WeightScale::kNone:
    case WeightScale::kTensor:
      break;
  }
  return single(WeightPlane::kScale, rows, cols);
}

}  // namespace

std::vector<PlaneShape> planes_of(DType dtype, const QuantSpec& quant, int64_t rows, int64_t cols) {
  std::vector<PlaneShape> planes = {{.rows = rows, .cols = cols}};
  if (is_plain(dtype)) return planes;
  const PlaneShape scale = scale_of(quant, rows, cols);
  planes.push_back(scale);
  if (quant.zeros != WeightZero::kNone) {
    planes.push_back(scale);
    planes.back().plane = WeightPlane::kZero;
    planes.back().type = PlaneType::kFloat;
  }
  if (quant.has_global_scale) planes.push_back(single(WeightPlane::kGlobalScale, rows, cols));
  if (quant.has_column_order) {
    planes.push_back(by_column(WeightPlane::kColumnOrder, rows, cols, PlaneType::kIndex));
  }
  if (quant.has_column_factors) {
    planes.push_back(by_column(WeightPlane::kColumnFactor, rows, cols, PlaneType::kFloat));
    planes.back().is_optional = true;
  }
  if (has_input_scale(quant)) {
    planes.push_back(single(WeightPlane::kInputScale, rows, cols));
  }
  return planes;
}

PlaneShape bias_of(int64_t rows) {
  return {.plane = WeightPlane::kBias, .rows = 1, .cols = rows, .type = PlaneType::kFloat};
}

PlaneShape plane_of(WeightPlane plane, DType dtype, const QuantSpec& quant, int64_t rows,
                    int64_t cols) {
  const std::vector<PlaneShape> planes = planes_of(dtype, quant, rows, cols);
  const auto found = std::ranges::find(planes, plane, &PlaneShape::plane);
  CONCLAVE_DCHECK(found != planes.end());
  return *found;
}

PlaneSlice slice(const PlaneShape& plane, const WeightBlock& block) {
  // A bias has a column for each row of its matrix.
  if (plane.plane == WeightPlane::kBias) {
    return {.block = {0, 1, block.row_begin, block.row_end}};
  }
  return {.block = {block.row_begin / plane.block_rows, ceil_div(block.row_end, plane.block_rows),
                    block.col_begin / plane.block_cols, ceil_div(block.col_end, plane.block_cols)},
          .skipped_rows = block.row_begin % plane.block_rows,
          .skipped_cols = block.col_begin % plane.block_cols};
}

}  // namespace conclave::inline v0::quant

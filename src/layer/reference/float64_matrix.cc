#include "layer/reference/float64_matrix.h"

#include "core/weight_types.h"
#include "quant/code_meaning.h"
#include "quant/planes.h"
#include "quant/weight_format.h"

#include <span>

namespace conclave::inline v0 {

Float64Matrix to_float64(const ConstTensorView& tensor) {
  Float64Matrix matrix{.rows = tensor.shape[0], .cols = tensor.shape[1], .values = {}};
  matrix.values.resize(static_cast<size_t>(tensor.shape.num_elements()));
  convert(tensor, {.data = matrix.values.data(), .dtype = DType::kF64, .shape = tensor.shape});
  return matrix;
}

Float64Matrix read_float64(const WeightSource& source, WeightId id, int64_t expert) {
  const ConstTensorView in_place = source.view(id, expert);
  if (!in_place.empty()) return to_float64(in_place);
  const WeightInfo info = source.describe(id);
  Tensor copy(info.dtype, {info.rows, info.cols});
  source.read(id, expert,
              {.row_begin = 0, .row_end = info.rows, .col_begin = 0, .col_end = info.cols},
              {copy.as<std::byte>(), copy.size_bytes()});
  return to_float64(copy.const_view());
}

WeightRows::WeightRows(const WeightSource& source, WeightId id, int64_t expert) {
  const WeightInfo info = source.describe(id);
  rows_ = info.rows;
  cols_ = info.cols;
  dtype_ = info.dtype;
  values_ = source.view(id, expert);
  if (!values_.empty()) return;
  stored_ = read(source, id, expert);
  values_ = {.data = stored_.data(), .dtype = dtype_, .shape = {rows_, cols_}};
}

WeightRows::WeightRows(const QuantSpec& quant, const WeightSource& source, WeightId id,
                       int64_t expert) {
  const WeightInfo info = source.describe(id);
  rows_ = info.rows;
  cols_ = info.cols;
  dtype_ = info.dtype;
  stored_ = read(source, id, expert);
  meaning_ = load_meaning(quant, source, id, expert, {0, rows_, 0, cols_});
  block_cols_ = quant::plane_of(WeightPlane::kScale, dtype_, quant, rows_, cols_).block_cols;
}

std::vector<std::byte> WeightRows::read(const WeightSource& source, WeightId id,
                                        int64_t expert) const {
  std::vector<std::byte> stored(static_cast<size_t>(rows_ * packed_bytes(dtype_, cols_)));
  source.read(id, expert, {0, rows_, 0, cols_}, stored);
  return stored;
}

void WeightRows::widen(int64_t row, std::vector<double>& values) const {
  values.resize(static_cast<size_t>(cols_));
  if (values_.empty()) return widen_codes(row, values);
  ConstTensorView one = values_;
  const int64_t stride = one.row_stride != 0 ? one.row_stride : cols_;
  one.data = static_cast<const std::byte*>(one.data) + row * stride * byte_size(dtype_);
  one.shape = {1, cols_};
  convert(one, {.data = values.data(), .dtype = DType::kF64, .shape = one.shape});
}

void WeightRows::widen_codes(int64_t row, std::vector<double>& values) const {
  const std::byte* const stored = stored_.data() + row * packed_bytes(dtype_, cols_);
  std::vector<float> codes(values.size());
  quant::format_of(dtype_).decode(stored, 0, cols_, codes.data());
  for (size_t col = 0; col < values.size(); ++col) {
    const int64_t group = meaning_.order.empty() ? static_cast<int64_t>(col) / block_cols_
                                                 : int64_t{meaning_.order[col]};
    const auto at = static_cast<size_t>(row * meaning_.groups + group);
    const double value = double{codes[col]} * double{meaning_.scales[at]};
    values[col] = meaning_.offsets.empty() ? value : value - meaning_.offsets[at];
  }
}

Float64Matrix read_scaled(const QuantSpec& quant, const WeightSource& source, WeightId id,
                          int64_t expert) {
  const WeightRows rows(quant, source, id, expert);
  Float64Matrix matrix{.rows = rows.rows(), .cols = rows.cols(), .values = {}};
  std::vector<double> row;
  for (int64_t index = 0; index < rows.rows(); ++index) {
    rows.widen(index, row);
    matrix.values.insert(matrix.values.end(), row.begin(), row.end());
  }
  return matrix;
}

double dot(const double* a, const double* b, int64_t count) {
  // Four chains keep the adders busy; in float64 the order of the sum is far below every bar.
  double sums[4] = {};
  int64_t index = 0;
  for (; index + 4 <= count; index += 4) {
    for (int lane = 0; lane < 4; ++lane) sums[lane] += a[index + lane] * b[index + lane];
  }
  for (; index < count; ++index) sums[0] += a[index] * b[index];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

}  // namespace conclave::inline v0

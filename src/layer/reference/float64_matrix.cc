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

Float64Matrix read_scaled(const QuantSpec& quant, const WeightSource& source, WeightId id,
                          int64_t expert) {
  const WeightInfo info = source.describe(id);
  const WeightBlock whole{0, info.rows, 0, info.cols};
  const quant::PlaneShape plane =
      quant::plane_of(WeightPlane::kScale, info.dtype, quant, info.rows, info.cols);
  const CodeMeaning meaning = load_meaning(quant, source, id, expert, whole);
  const int64_t row_bytes = packed_bytes(info.dtype, info.cols);
  std::vector<std::byte> rows(static_cast<size_t>(info.rows * row_bytes));
  source.read(id, expert, whole, rows);
  Float64Matrix matrix{.rows = info.rows, .cols = info.cols, .values = {}};
  matrix.values.reserve(static_cast<size_t>(info.rows * info.cols));
  std::vector<float> codes(static_cast<size_t>(info.cols));
  for (int64_t row = 0; row < info.rows; ++row) {
    const std::byte* const stored = rows.data() + row * row_bytes;
    quant::format_of(info.dtype).decode(stored, 0, info.cols, codes.data());
    for (int64_t col = 0; col < info.cols; ++col) {
      const auto column = static_cast<size_t>(col);
      const int64_t group =
          meaning.order.empty() ? col / plane.block_cols : int64_t{meaning.order[column]};
      const auto at = static_cast<size_t>(row * meaning.groups + group);
      const double value = double{codes[column]} * double{meaning.scales[at]};
      matrix.values.push_back(meaning.offsets.empty() ? value : value - meaning.offsets[at]);
    }
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

#include "layer/reference/float64_matrix.h"

namespace conclave::inline v0 {

Float64Matrix to_float64(const ConstTensorView& tensor) {
  Float64Matrix matrix{.rows = tensor.shape[0], .cols = tensor.shape[1], .values = {}};
  matrix.values.resize(static_cast<size_t>(tensor.shape.num_elements()));
  convert(tensor, {.data = matrix.values.data(), .dtype = DType::kF64, .shape = tensor.shape});
  return matrix;
}

Float64Matrix read_float64(const WeightSource& source, WeightRole role, int64_t expert) {
  const ConstTensorView in_place = source.view(role, expert);
  if (!in_place.empty()) return to_float64(in_place);
  const WeightInfo info = source.describe(role);
  Tensor copy(info.dtype, {info.rows, info.cols});
  source.read(role, expert,
              {.row_begin = 0, .row_end = info.rows, .col_begin = 0, .col_end = info.cols},
              {copy.as<std::byte>(), copy.size_bytes()});
  return to_float64(copy.const_view());
}

double dot(const double* a, const double* b, int64_t count) {
  // Four chains keep the adders busy; at float64 their order is far below every bar.
  double sums[4] = {};
  int64_t index = 0;
  for (; index + 4 <= count; index += 4) {
    for (int lane = 0; lane < 4; ++lane) sums[lane] += a[index + lane] * b[index + lane];
  }
  for (; index < count; ++index) sums[0] += a[index] * b[index];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

}  // namespace conclave::inline v0

#include "layer/quant_scales.h"

#include "core/float8.h"
#include "layer/weight_block.h"
#include "quant/planes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace conclave::inline v0 {
namespace {

std::vector<float> widen(const ConstTensorView& scales) {
  const int64_t rows = scales.shape[0];
  const int64_t cols = scales.shape[1];
  std::vector<float> values(static_cast<size_t>(rows * cols));
  if (scales.dtype != DType::kF8E8M0) {
    convert(scales, {.data = values.data(), .dtype = DType::kF32, .shape = scales.shape});
    return values;
  }
  const int64_t stride = scales.row_stride != 0 ? scales.row_stride : cols;
  const auto* codes = static_cast<const uint8_t*>(scales.data);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      values[static_cast<size_t>(row * cols + col)] = e8m0_to_float(codes[row * stride + col]);
    }
  }
  return values;
}

[[noreturn]] void refuse(const WeightSource& source, WeightId id, int64_t expert, float value,
                         const char* expected) {
  throw Error(ErrorCode::kTensorValue, {.what = "a scale has no meaning",
                                        .tensor = source.locate(id, expert),
                                        .expected = expected,
                                        .found = fmt::format("{}", value)});
}

WeightBlock whole(const WeightInfo& info) { return {0, info.rows, 0, info.cols}; }

void take_largest(const WeightSource& source, WeightId matrix, float& largest) {
  const WeightId id = matrix.with(WeightPlane::kInputScale);
  const int64_t count = source.describe(id).count;
  for (int64_t expert = 0; expert < count; ++expert) {
    const float value = load_scales({}, source, id, expert).front();
    if (!(value > 0)) refuse(source, id, expert, value, "finite and positive");
    largest = std::max(largest, value);
  }
}

}  // namespace

std::vector<float> load_scales(const QuantSpec& quant, const WeightSource& source, WeightId id,
                               int64_t expert, const WeightBlock& block) {
  BlockLoader loader(source);
  const BlockRequest request{.id = id, .expert = expert, .block = block};
  ConstTensorView view;
  loader.load({&request, 1}, {&view, 1});
  std::vector<float> scales = widen(view);
  for (const float value : scales) {
    if (std::isfinite(value) && (quant.signed_scales || value >= 0)) continue;
    refuse(source, id, expert, value, quant.signed_scales ? "finite" : "finite and not negative");
  }
  return scales;
}

std::vector<float> load_scales(const QuantSpec& quant, const WeightSource& source, WeightId id,
                               int64_t expert) {
  return load_scales(quant, source, id, expert, whole(source.describe(id)));
}

std::vector<float> load_row_scales(const QuantSpec& quant, const WeightSource& source,
                                   WeightId matrix, int64_t expert, const WeightBlock& block) {
  const WeightInfo info = source.describe(matrix);
  const quant::PlaneShape plane =
      quant::plane_of(WeightPlane::kScale, info.dtype, quant, info.rows, info.cols);
  const quant::PlaneSlice part = quant::slice(plane, block);
  const std::vector<float> loaded =
      load_scales(quant, source, matrix.with(WeightPlane::kScale), expert, part.block);
  const int64_t cols = part.block.col_end - part.block.col_begin;
  const int64_t rows = block.row_end - block.row_begin;
  std::vector<float> of_rows;
  of_rows.reserve(static_cast<size_t>(rows * cols));
  for (int64_t row = 0; row < rows; ++row) {
    const auto first = loaded.begin() + (part.skipped_rows + row) / plane.block_rows * cols;
    of_rows.insert(of_rows.end(), first, first + cols);
  }
  return of_rows;
}

StaticScales load_static_scales(const WeightSource& source, WeightMlp mlp) {
  StaticScales scales{.input = 0, .intermediate = 0};
  take_largest(source, {mlp, WeightMatrix::kGate}, scales.input);
  take_largest(source, {mlp, WeightMatrix::kUp}, scales.input);
  take_largest(source, {mlp, WeightMatrix::kDown}, scales.intermediate);
  return scales;
}

}  // namespace conclave::inline v0

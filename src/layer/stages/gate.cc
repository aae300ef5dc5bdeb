#include "layer/stages/gate.h"

#include "core/float_convert.h"
#include "cpu/parallel.h"

#include <algorithm>
#include <cmath>

namespace conclave::inline v0 {
namespace {

constexpr int64_t kRowsPerTask = 16;

float rounded(float value, DType dtype) {
  if (dtype == DType::kBF16) return bf16_to_float(float_to_bf16(value));
  if (dtype == DType::kF16) return f16_to_float(float_to_f16(value));
  return value;
}

// x / sqrt(mean(x^2) + epsilon) * weight * H^-0.5, with one rounding per element. `to` may be
// `from`.
void norm_row(const float* from, const std::vector<float>& weight, double epsilon, float* to) {
  const size_t columns = weight.size();
  double squares = 0;
  for (size_t col = 0; col < columns; ++col) squares += double{from[col]} * double{from[col]};
  const auto width = static_cast<double>(columns);
  const double factor = 1.0 / (std::sqrt(squares / width + epsilon) * std::sqrt(width));
  for (size_t col = 0; col < columns; ++col) {
    to[col] = static_cast<float>(double{from[col]} * factor * double{weight[col]});
  }
}

void add_bias(const Gate& gate, int64_t tokens, float* logits, Executor& executor) {
  const std::vector<float>& bias = gate.vectors.logit_bias;
  const DType dtype = gate.router.logits_dtype;
  const auto columns = static_cast<int64_t>(bias.size());
  const auto add = [&](int64_t begin, int64_t end, int32_t) noexcept {
    for (int64_t token = begin; token < end; ++token) {
      float* row = logits + token * columns;
      for (int64_t i = 0; i < columns; ++i) {
        row[i] = rounded(row[i] + bias[static_cast<size_t>(i)], dtype);
      }
    }
  };
  cpu::parallel_for(executor, tokens, kRowsPerTask, add);
}

}  // namespace

RowBundle norm_gate_rows(const Gate& gate, const RowBundle& rows, int64_t row_bytes, std::byte* to,
                         Executor& executor) {
  const std::vector<float>& weight = gate.vectors.input_scale;
  const int64_t width = row_bytes / int64_t{sizeof(float)};
  const auto columns = static_cast<int64_t>(weight.size());
  const auto norm = [&](int64_t begin, int64_t end, int32_t) noexcept {
    for (int64_t row = begin; row < end; ++row) {
      const void* const from = rows.rows + row * rows.row_bytes;
      auto* const normed = static_cast<float*>(static_cast<void*>(to + row * row_bytes));
      norm_row(static_cast<const float*>(from), weight, gate.router.input_norm.epsilon, normed);
      std::fill(normed + columns, normed + width, 0.0F);
    }
  };
  cpu::parallel_for(executor, rows.num_rows, kRowsPerTask, norm);
  return {.rows = to, .num_rows = rows.num_rows, .row_bytes = row_bytes, .dtype = DType::kF32};
}

void run_gate(const Gate& gate, const RowBundle& rows, float* logits, Executor& executor) {
  const bool has_bias = gate.router.has_logit_bias;
  const DType round_to = has_bias ? DType::kF32 : gate.router.logits_dtype;
  gate.product.run(rows, logits, round_to, executor);
  if (has_bias) add_bias(gate, rows.num_rows, logits, executor);
}

const float* dense_logits(const ConstTensorView& given, float* to) {
  // Routers only read: rows that already have their layout are used in place.
  if (given.dtype == DType::kF32 && given.row_stride == given.shape[1]) {
    return static_cast<const float*>(given.data);
  }
  convert(given, {.data = to, .dtype = DType::kF32, .shape = given.shape});
  return to;
}

}  // namespace conclave::inline v0

#include "experts/coded_rows.h"

#include "core/checked.h"
#include "core/float8.h"

#include <algorithm>

namespace conclave::inline v0::experts {
namespace {

float* floats(std::byte* row) { return static_cast<float*>(static_cast<void*>(row)); }

}  // namespace

CodedRows::CodedRows(const QuantSpec& quant, int64_t columns, int64_t padded_columns)
    : quant_(quant), columns_(columns), padded_columns_(padded_columns) {}

int64_t CodedRows::row_bytes() const {
  const int64_t scales = quant::scales_per_row(quant_.activations, columns_);
  return round_up((padded_columns_ + scales) * int64_t{sizeof(float)}, 64);
}

gemm::RowScales CodedRows::scales(const std::byte* rows) const {
  if (!coded()) return {};
  return {.first = rows + padded_columns_ * int64_t{sizeof(float)},
          .width = quant::scale_width(quant_.activations, columns_)};
}

// Each pass of the loop takes the columns that share a scale.
void CodedRows::quantize(float static_scale, std::byte* row) const {
  if (!coded()) return;
  const quant::ActivationRule rule{.form = quant_.activations,
                                   .power_of_two_scales = quant_.power_of_two_scales,
                                   .static_scale = static_scale};
  float* const values = floats(row);
  float* scale = values + padded_columns_;
  const int64_t width = quant::scale_width(rule.form, columns_);
  for (int64_t begin = 0; begin < columns_; begin += width, ++scale) {
    const int64_t end = std::min(columns_, begin + width);
    *scale = quant::scale_of(values + begin, end - begin, rule);
    for (int64_t i = begin; i < end; ++i) {
      values[i] = e4m3_to_float(quant::activation_code(values[i], *scale));
    }
  }
}

}  // namespace conclave::inline v0::experts

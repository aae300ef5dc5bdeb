#include "experts/coded_rows.h"

#include "core/checked.h"

namespace conclave::inline v0::experts {
namespace {

float* floats(std::byte* row) { return static_cast<float*>(static_cast<void*>(row)); }

}  // namespace

CodedRows::CodedRows(const quant::ActivationRule& rule, bool has_factors, int64_t columns,
                     int64_t padded_columns)
    : rule_(rule), has_factors_(has_factors), columns_(columns), padded_columns_(padded_columns) {}

int64_t CodedRows::row_bytes() const {
  const int64_t scales = quant::scales_per_row(rule_, columns_);
  return round_up((padded_columns_ + scales) * int64_t{sizeof(float)}, 64);
}

gemm::RowScales CodedRows::scales(const std::byte* rows) const {
  if (!coded()) return {};
  return {.first = rows + padded_columns_ * int64_t{sizeof(float)},
          .width = quant::scale_width(rule_, columns_)};
}

void CodedRows::prepare(const float* factors, float static_scale, std::byte* row) const {
  float* const values = floats(row);
  if (has_factors_) {
    for (int64_t i = 0; i < columns_; ++i) values[i] *= factors[i];
  }
  if (!coded()) return;
  quant::ActivationRule rule = rule_;
  rule.static_scale = static_scale;
  quant::round_to_activation_codes(values, columns_, rule, values + padded_columns_);
}

}  // namespace conclave::inline v0::experts

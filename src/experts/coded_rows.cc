#include "experts/coded_rows.h"

#include "core/checked.h"
#include "core/float_convert.h"

#include <cstring>
#include <numeric>

namespace conclave::inline v0::experts {
namespace {

float* floats(std::byte* row) { return static_cast<float*>(static_cast<void*>(row)); }
int32_t* integers(std::byte* row) { return static_cast<int32_t*>(static_cast<void*>(row)); }

int64_t count_segments(const gemm::WeightGroups& groups, const gemm::RowScales& rows) {
  int64_t count = 0;
  for (int64_t begin = 0; begin < groups.k; begin = gemm::segment_end(groups, rows, begin)) ++count;
  return count;
}

}  // namespace

CodedRows::CodedRows(const CodedRowsConfig& config)
    : config_(config),
      num_scales_(quant::scales_per_row(config.rule, columns())),
      form_({.width = quant::scale_width(config.rule, columns()),
             .exact_k = config.rule.exact_columns,
             .sums_at = num_scales_ * int64_t{sizeof(float)}}) {
  if (coded() && (config_.code_row != nullptr || config_.panels.has_offsets)) {
    num_segments_ = count_segments(config_.panels.groups(), form_);
  }
  constexpr int64_t kWord = sizeof(float);
  row_bytes_ = round_up(config_.value_bytes + (num_scales_ + num_segments_) * kWord, 64);
}

gemm::RowScales CodedRows::scales(const std::byte* rows) const {
  if (!coded()) return {};
  gemm::RowScales scales = form_;
  scales.first = rows + config_.value_bytes;
  return scales;
}

void CodedRows::prepare(const float* factors, float static_scale, const float* values,
                        std::byte* row) const {
  quant::ActivationRule rule = config_.rule;
  rule.static_scale = static_scale;
  if (config_.code_row != nullptr) return code_row(rule, values, row);
  float* const own = floats(row);
  if (values != own) std::memcpy(own, values, static_cast<size_t>(columns()) * sizeof(float));
  if (config_.has_factors) {
    for (int64_t i = 0; i < columns(); ++i) own[i] *= factors[i];
  }
  if (!coded()) return;
  std::byte* const after_values = row + config_.value_bytes;
  quant::round_to_activation_codes(own, columns(), rule, floats(after_values));
  if (num_segments_ != 0) sum_segments(own, integers(after_values + form_.sums_at));
  if (config_.code_dtype == DType::kBF16) narrow(row);
}

// In place: each value takes half of what its own float32 leaves or an earlier one left.
void CodedRows::narrow(std::byte* row) const {
  constexpr auto kBytes = sizeof(uint16_t);
  std::byte* out = row;
  for (int64_t i = 0; i < columns(); ++i, out += kBytes) {
    float value;
    std::memcpy(&value, row + i * int64_t{sizeof(value)}, sizeof(value));
    const uint16_t bits = float_to_bf16(value);
    std::memcpy(out, &bits, kBytes);
  }
  const int64_t padding = round_up(columns(), 32) - columns();
  std::memset(out, 0, static_cast<size_t>(padding) * kBytes);
}

void CodedRows::sum_segments(const float* codes, int32_t* sums) const {
  const gemm::WeightGroups groups = config_.panels.groups();
  for (int64_t begin = 0; begin < columns();) {
    const int64_t end = gemm::segment_end(groups, form_, begin);
    *sums++ = static_cast<int32_t>(std::accumulate(codes + begin, codes + end, 0.0F));
    begin = end;
  }
}

void CodedRows::code_row(const quant::ActivationRule& rule, const float* values,
                         std::byte* row) const {
  std::byte* const after_values = row + config_.value_bytes;
  const bool is_static = rule.form == ActivationScale::kTensorStatic;
  config_.code_row({.values = values,
                    .columns = columns(),
                    .static_scale = is_static ? &rule.static_scale : nullptr,
                    .power_of_two_scales = rule.power_of_two_scales,
                    .codes = row,
                    .scales = floats(after_values),
                    .sums = integers(after_values + form_.sums_at),
                    .groups = config_.panels.groups(),
                    .rows = form_});
}

}  // namespace conclave::inline v0::experts

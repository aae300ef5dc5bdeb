// Rows of activations as kernels multiply them with weights that are codes: times the factors of
// their columns, and as codes of their own or the values of these.
#pragma once

#include "gemm/cpu/code_row.h"
#include "gemm/packed_layout.h"
#include "gemm/row_scales.h"
#include "quant/activation_rows.h"

#include "conclave/spec.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::experts {

struct CodedRowsConfig {
  quant::ActivationRule rule = {};
  bool has_factors = false;  // columns are multiplied by factors first
  int64_t value_bytes = 0;   // what a row has before its scales: float32 values, or codes
  // The panels that rows are multiplied with; their k is the rows' columns.
  gemm::PanelLayout panels = {};
  // Rows become codes by this function; null: they become the values of codes. Without factors
  // only.
  gemm::CodeRowFunction code_row = nullptr;
  // kF32 or kBF16, the type of codes' values; zeros follow those of bf16 up to a multiple of 32.
  DType code_dtype = DType::kF32;
};

// A row has `value_bytes` of values or of codes, then its scales; then, if it has codes or
// weights have offsets, the sums of its codes, one for each segment of gemm/row_scales.h. With
// ActivationScale::kNone rows have no scales; without factors either, they are not touched.
class CodedRows {
 public:
  explicit CodedRows(const CodedRowsConfig& config);

  // Whether rows must be prepared at all.
  bool changes() const { return coded() || config_.has_factors; }
  // Whether a row is the same for every expert.
  bool are_shared() const { return !config_.has_factors; }
  int64_t row_bytes() const { return row_bytes_; }  // a multiple of 64
  // Finds the scales of the rows that begin at `rows`.
  gemm::RowScales scales(const std::byte* rows) const;
  // Makes the row of `values`, which may be its own: times `factors`, where there are, then codes.
  // Only rules with a step of the checkpoint use `static_scale`.
  void prepare(const float* factors, float static_scale, const float* values, std::byte* row) const;

 private:
  bool coded() const { return config_.rule.form != ActivationScale::kNone; }
  int64_t columns() const { return config_.panels.k; }
  void narrow(std::byte* row) const;
  void sum_segments(const float* codes, int32_t* sums) const;
  void code_row(const quant::ActivationRule& rule, const float* values, std::byte* row) const;

  CodedRowsConfig config_;
  int64_t num_scales_ = 0;
  gemm::RowScales form_ = {};  // without a place
  int64_t num_segments_ = 0;   // that have sums
  int64_t row_bytes_ = 0;
};

}  // namespace conclave::inline v0::experts

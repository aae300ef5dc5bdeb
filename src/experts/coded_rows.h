// Rows of activations as kernels multiply them with weights that are codes: times the factors of
// their columns, and as the values of codes of their own.
#pragma once

#include "gemm/row_scales.h"
#include "quant/activation_rows.h"

#include "conclave/spec.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::experts {

// A row is `padded_columns` float32 values, then its scales. With ActivationScale::kNone rows have
// no scales; without factors either, they are not touched.
class CodedRows {
 public:
  CodedRows(const quant::ActivationRule& rule, bool has_factors, int64_t columns,
            int64_t padded_columns);

  // Whether rows must be prepared at all.
  bool changes() const { return coded() || has_factors_; }
  int64_t row_bytes() const;  // a multiple of 64
  // Finds the scales of the rows that begin at `rows`.
  gemm::RowScales scales(const std::byte* rows) const;
  // Multiplies the row's values by `factors`, where there are, then replaces them by those of their
  // codes and writes its scales. Only ActivationScale::kTensorStatic uses `static_scale`.
  void prepare(const float* factors, float static_scale, std::byte* row) const;

 private:
  bool coded() const { return rule_.form != ActivationScale::kNone; }

  quant::ActivationRule rule_;
  bool has_factors_;
  int64_t columns_;
  int64_t padded_columns_;
};

}  // namespace conclave::inline v0::experts

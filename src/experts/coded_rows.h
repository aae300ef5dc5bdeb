// Rows of activations as the values of their codes: what kernels multiply with weights that are
// codes themselves.
#pragma once

#include "gemm/row_scales.h"
#include "quant/activation_rows.h"

#include "conclave/spec.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::experts {

// A row is `padded_columns` float32 values, then its scales. With ActivationScale::kNone rows stay
// plain and have no scales.
class CodedRows {
 public:
  CodedRows(const quant::ActivationRule& rule, int64_t columns, int64_t padded_columns);

  bool coded() const { return rule_.form != ActivationScale::kNone; }
  int64_t row_bytes() const;  // a multiple of 64
  // Finds the scales of the rows that begin at `rows`.
  gemm::RowScales scales(const std::byte* rows) const;
  // Replaces the row's values by those of their codes and writes its scales; leaves plain rows as
  // they are. Only ActivationScale::kTensorStatic uses `static_scale`.
  void quantize(float static_scale, std::byte* row) const;

 private:
  quant::ActivationRule rule_;
  int64_t columns_;
  int64_t padded_columns_;
};

}  // namespace conclave::inline v0::experts

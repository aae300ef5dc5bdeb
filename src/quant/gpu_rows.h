// The forms in which kernels of a GPU read quantised rows.
#pragma once

#include "quant/activation_rows.h"

#include "conclave/error.h"

namespace conclave::inline v0::quant {

// Yes if they may be codes, with a float32 scale for each row or for each 128 columns of it.
Support code_rows_support(DType weights, const QuantSpec& quant);

// Yes if they may be the values of codes in bf16, which holds them, times what float32 holds for a
// whole row: the scales of its groups are powers of two or have so few bits that the products are
// exact.
Support value_rows_support(DType weights, const QuantSpec& quant);

// Says what the values of such rows are multiplied by.
enum class RowFactor : uint8_t {
  kNone,    // the scales are in the values
  kOfRow,   // one for each row, made of it
  kStated,  // WeightPlane::kInputScale, one for all
};
RowFactor row_factor(const QuantSpec& quant);

}  // namespace conclave::inline v0::quant

// This says what follows from a QuantSpec, whatever its formats.
#pragma once

#include "conclave/dtype.h"
#include "conclave/spec.h"

#include <cstdint>

namespace conclave::inline v0 {

// Columns of a row that share the t of ScaleValues::kSteps.
inline constexpr int64_t kStepColumns = 256;

// Whether matrices have the plane WeightPlane::kInputScale: steps of rows that a checkpoint states.
inline bool has_input_scale(const QuantSpec& quant) {
  return quant.activations == ActivationScale::kTensorStatic ||
         quant.activation_scale_rule == RowScaleRule::kTwoLevel;
}

// The form of one kind of matrix: the layer's, as narrow as it is known to be.
struct MatrixForm {
  DType dtype = DType::kF32;
  QuantSpec quant = {};  // without what is known of matrices
};

inline QuantSpec quant_of_matrix(QuantSpec quant, const MatrixCodes& known) {
  if (known.block_cols != 0) quant.block_cols = known.block_cols;
  if (known.scale_values != ScaleValues::kFloat) quant.scale_values = known.scale_values;
  if (known.zero_values != ScaleValues::kFloat) quant.zero_values = known.zero_values;
  if (!known.has_zeros) {
    quant.zeros = WeightZero::kNone;
    quant.zero_values = ScaleValues::kFloat;
  }
  quant.gate_up_codes = {};
  quant.down_codes = {};
  return quant;
}
inline MatrixForm form_of_matrix(DType dtype, const QuantSpec& layer, const MatrixCodes& known) {
  return {.dtype = known.dtype.value_or(dtype), .quant = quant_of_matrix(layer, known)};
}
inline MatrixForm gate_up_form(DType dtype, const QuantSpec& layer) {
  return form_of_matrix(dtype, layer, layer.gate_up_codes);
}
inline MatrixForm down_form(DType dtype, const QuantSpec& layer) {
  return form_of_matrix(dtype, layer, layer.down_codes);
}

}  // namespace conclave::inline v0

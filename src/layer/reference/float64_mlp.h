// One MLP in float64, its weights widened from the source row by row.
#pragma once

#include "activation/activations.h"
#include "layer/reference/adapters.h"
#include "layer/reference/float64_matrix.h"
#include "quant/activation_rows.h"

#include "conclave/weights.h"

#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0 {

// Absent parts have no values: the gate of an activation without one, biases.
struct Float64Mlp {
  WeightRows gate;
  WeightRows up;
  WeightRows down;
  Float64Matrix gate_bias;
  Float64Matrix up_bias;
  Float64Matrix down_bias;
  // Factors of the columns of input and of activated rows; empty where there are none.
  Float64Matrix input_factors;  // [1, H]
  Float64Matrix inner_factors;  // [1, I]
  // Rules by which the rows that gate, up and down multiply are quantised.
  quant::ActivationRule input_rule;
  quant::ActivationRule inner_rule;
  std::vector<double> down_squares;  // [I], per column of down; for quantised rows only
};

// The activation of a part of the layer.
activation::Activation activation_of(const MoeSpec& spec, WeightMlp part);
Float64Mlp read_mlp(const MoeSpec& spec, const WeightSource& source, WeightMlp part,
                    int64_t expert);

// How activated rows become codes, where they do.
struct RowCodes {
  double ambiguity = 0;  // as ReferenceArgs::code_ambiguity
  int32_t slices = 1;    // parts of the row, each with scales of its own
};

// With matrices of codes and quantised rows, x and the activated row are rounded to float32, then
// to codes, by the kernels' rule; all else is float64.
// out = down . act(gate . x + gate_bias, up . x + up_bias) + down_bias
struct Float64Row {
  const double* x = nullptr;
  double* out = nullptr;
  const Float64Adapter* adapter = nullptr;  // reads rows before they become codes
  // The square of how far `out` may move in L2 if codes of the activated row are ambiguous at the
  // relative error of RowCodes: the sum of the squares of their moves, each through its column
  // of down, as if these columns were orthogonal.
  double allowed = 0;
};
// Rows share the widened weights: all that one thread has should come at once.
void run_mlp(const Float64Mlp& mlp, const activation::Activation& activation,
             std::span<Float64Row> rows, const RowCodes& codes);

}  // namespace conclave::inline v0

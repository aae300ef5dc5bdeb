// A weight matrix or a tensor's rows as doubles: exact, since a double holds every stored type.
#pragma once

#include "conclave/tensor.h"
#include "conclave/weights.h"

#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

struct Float64Matrix {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<double> values;  // [rows, cols]

  const double* row(int64_t index) const { return values.data() + index * cols; }
  double* row(int64_t index) { return values.data() + index * cols; }
};

// tensor [rows, cols] of f32, f64, f16 or bf16; rows may be strided.
Float64Matrix to_float64(const ConstTensorView& tensor);
// Reads one matrix of a source.
Float64Matrix read_float64(const WeightSource& source, WeightId id, int64_t expert);

// Reads one matrix of codes of a source: each code times its scale, exactly.
Float64Matrix read_scaled(const QuantSpec& quant, const WeightSource& source, WeightId id,
                          int64_t expert);

double dot(const double* a, const double* b, int64_t count);

}  // namespace conclave::inline v0

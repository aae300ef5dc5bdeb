// A weight matrix or a tensor's rows as doubles: exact, since a double holds every stored type.
#pragma once

#include "quant/code_meaning.h"

#include "conclave/tensor.h"
#include "conclave/weights.h"

#include <cstddef>
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

// A matrix as its source has it, whose rows become doubles one by one: all of them at once take
// eight bytes a weight.
class WeightRows {
 public:
  WeightRows() = default;
  // Its matrix has values.
  WeightRows(const WeightSource& source, WeightId id, int64_t expert);
  // Its matrix has codes: each stands for itself times its scale, exactly.
  WeightRows(const QuantSpec& quant, const WeightSource& source, WeightId id, int64_t expert);

  bool empty() const { return rows_ == 0; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  // Writes a row's values.
  void widen(int64_t row, std::vector<double>& values) const;

 private:
  std::vector<std::byte> read(const WeightSource& source, WeightId id, int64_t expert) const;
  void widen_codes(int64_t row, std::vector<double>& values) const;

  int64_t rows_ = 0;
  int64_t cols_ = 0;
  ConstTensorView values_ = {};  // where the source has them, or in stored_; empty for codes
  std::vector<std::byte> stored_;
  DType dtype_ = DType::kF32;
  CodeMeaning meaning_;
  int64_t block_cols_ = 1;
};

// Reads one matrix of codes of a source: each code times its scale, exactly.
Float64Matrix read_scaled(const QuantSpec& quant, const WeightSource& source, WeightId id,
                          int64_t expert);

double dot(const double* a, const double* b, int64_t count);

}  // namespace conclave::inline v0

// The tensors that a method has for a matrix: what it lists itself, and those of the usual names.
#pragma once

#include "checkpoint/methods/method.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

// A matrix by itself, which is neither fused with another nor in a stack.
MatrixForm matrix_form(const QuantizedWeights& quant, int64_t rows, int64_t cols);

struct TensorRow {
  std::string name;
  MethodTensor::Use use = MethodTensor::Use::kPlane;
  WeightPlane plane = WeightPlane::kWeights;
  const StoredPlane* row = nullptr;  // null: its name and shape are the usual ones
};

// For a matrix of this name: codes first, then scales and what belongs to them. Of several rows for
// a plane the first counts. `method` is the quant_method.
std::vector<TensorRow> tensor_rows(const QuantizedWeights& quant, std::string_view method,
                                   std::string_view matrix);

// The usual shape and types of one of them; both empty for tensors of which nothing is known.
std::vector<int64_t> shape_of(const TensorRow& tensor, const MatrixForm& form);
std::vector<DType> types_of(const TensorRow& tensor, const MatrixForm& form);

}  // namespace conclave::inline v0::checkpoint

// Names of a quantisation method's own tensors, and how each is read: what a layer asks of a row
// of the method's table.
#pragma once

#include "checkpoint/methods/method.h"
#include "checkpoint/tensor_table.h"
#include "quant/planes.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

// A name as a tensor of a matrix: "w1.qzeros" of "w1.weight".
struct StoredName {
  std::string matrix;
  const StoredPlane* row = nullptr;
};
// All readings of a name that the method has; without one, none.
std::vector<StoredName> stored_names(const std::optional<QuantizedWeights>& quant,
                                     std::string_view name);

// The row by which a tensor has codes; null for tensors that lie as the spec says.
const StoredPlane* codes_row(const std::optional<QuantizedWeights>& quant, const TensorInfo& info);
// The same for a matrix that a layer has as values, whose codes may lie as those of experts do.
const StoredPlane* values_row(const std::optional<QuantizedWeights>& quant, const TensorInfo& info);
// The name of the matrix whose codes have this name; nothing if it is the matrix's own.
std::optional<std::string> matrix_name(const std::optional<QuantizedWeights>& quant,
                                       std::string_view name);
// The type of the tensor's elements, if it holds a matrix.
DType type_as_codes(const std::optional<QuantizedWeights>& quant, const TensorInfo& info);
// The method's row for a plane of a matrix of that name, or for its codes; null where the usual
// names count.
const StoredPlane* row_of(const std::optional<QuantizedWeights>& quant, std::string_view matrix,
                          WeightPlane plane);
// The name of that plane.
std::string stored_name(const StoredPlane& row, std::string_view matrix);

struct CodedMatrix;

// How the elements of a plane come from what is stored: `slices` equal parts, one after the other,
// each of them from the same part of every input.
struct PlaneReading {
  const StoredPlane* row = nullptr;
  MatrixForm form = {};
  DType dtype = DType::kF32;
  int64_t slices = 1;
  int64_t slice_elements = 0;
  std::vector<int32_t> inputs = {};  // the tensor itself first; -1: an optional one is absent
  bool as_values = false;            // codes that become float32
  // False: a layer has the matrix as values only, and the method's codes are not read so.
  bool is_read = true;
  // Set for values that come from several planes of codes; `row` may be null then.
  std::shared_ptr<const CodedMatrix> coded = nullptr;

  // Whether the bytes of the plane are those of the tensor, but for StoredPlane::convert.
  bool lies_in_place() const;
};

// A plane [rows, cols] of a matrix, or of each matrix of a stack of `slices`.
struct WantedPlane {
  MatrixForm form;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t slices = 1;
  bool is_stack = false;
  bool as_values = false;         // a layer has the matrix as values only
  DType spec_type = DType::kF32;  // what codes have
};
// Without inputs beside the tensor. Throws Error(kTensorShape, kTensorDType) for a tensor that the
// method does not store so.
PlaneReading read_as(const StoredPlane& row, const WantedPlane& wanted, const TensorTable& table,
                     int32_t tensor);
// The shapes in which it may be stored, the usual one first.
StoredShapes shapes_of(const StoredPlane& row, const WantedPlane& wanted);

}  // namespace conclave::inline v0::checkpoint

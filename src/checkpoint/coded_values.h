// Matrices that a layer has as values, such as its router, where the model's method has packed them
// as it packs those of experts: their planes are the same, and give the values.
#pragma once

#include "checkpoint/layer_map.h"
#include "checkpoint/layer_view.h"
#include "checkpoint/manifest.h"
#include "checkpoint/tensor_data.h"
#include "checkpoint/tensor_table.h"

#include "conclave/spec.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace conclave::inline v0::checkpoint {

// The codes of one matrix and the planes that give them a meaning.
struct CodedMatrix {
  QuantSpec spec;   // rows stay as they are
  LayerMap planes;  // those of a single down matrix

  // Writes the values as float32, row by row, each rounded once. Throws Error(kTensorValue) naming
  // the tensor whose values mean nothing, and what reading throws. `verifier` may be null.
  void decode(const TensorTable& table, const TensorData& data, const Verifier* verifier,
              std::span<std::byte> values) const;
};

// The forms that a model's method gives to its modules, and to those of a layer.
struct MethodForms {
  const std::optional<QuantizedWeights>& model;
  const std::optional<QuantizedWeights>& layer;
};
// The form of the module that a tensor with this name belongs to; null where it has none, or one
// that is not read.
const std::optional<QuantizedWeights>* form_of_values(const MethodForms& forms,
                                                      std::string_view name);

// Whether the tensor holds codes in that form. `row` is the method's row for it, or null.
bool holds_codes(const QuantizedWeights& quant, const StoredPlane* row, const TensorInfo& info);

// The type of a matrix that a layer has as values: float32 where codes are stored.
DType type_of_values(DType stored);

// The matrix of values to which a name belongs, if that matrix is packed.
struct ValueAid {
  std::string matrix;
  StoredPlane::Use use = StoredPlane::Use::kInput;
};
std::optional<ValueAid> match_value_aid(const Architecture& architecture,
                                        const std::optional<QuantizedWeights>& quant,
                                        const LayerShapes& shapes, std::string_view rest);

using TensorsByName = std::unordered_map<std::string_view, int32_t>;

// Finds the planes of the codes in a tensor, which has `rows` x `cols` of them. Names of what is
// missing are added to `missing`. Throws Error(kTensorShape, kTensorDType, kTensorDuplicate).
struct CodesTensor {
  const QuantizedWeights& quant;
  const StoredPlane* row = nullptr;  // null: codes lie as the form says
  int32_t tensor = -1;
  int64_t rows = 0;
  int64_t cols = 0;
};
PlaneReading read_codes_as_values(const LayerView& view, const CodesTensor& codes,
                                  const TensorsByName& by_name, std::vector<std::string>& missing);

// Completes a reading with the tensors that stand beside its own.
void add_inputs(const TensorTable& table, const TensorsByName& by_name, PlaneReading& reading,
                std::vector<std::string>& missing);

}  // namespace conclave::inline v0::checkpoint

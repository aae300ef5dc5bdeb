// The tensors of a linear layer whose weights have a form, and what config.json says of the form.
#pragma once

#include "conclave/format.h"
#include "conclave/weights.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::tool {

struct FormTensor {
  enum class Content : uint8_t {
    kPlane,
    kInverse,  // one over the plane, which is a divisor in the file
    kSizes,    // rows and columns of the matrix
  };
  std::string name;  // after the layer's own: "weight_packed"
  WeightPlane plane = WeightPlane::kWeights;
  Content content = Content::kPlane;
  DType dtype = DType::kBF16;  // as the file has it, with `shape`: codes may fill words or bytes
  std::vector<int64_t> shape;
  uint64_t bytes = 0;
};

// The tensors for a matrix [rows, cols], its weights first. Throws Error(kUnsupported), naming
// `layer`, if rows do not fill whole elements.
std::vector<FormTensor> form_tensors(const WeightForm& form, int64_t rows, int64_t cols,
                                     const std::string& layer);

// The quantization_config of a form that has a method. `kept` names the linear layers without
// codes, in the method's own way: whole names, or "re:" and a pattern.
nlohmann::ordered_json quantization_config(const WeightForm& form,
                                           const std::vector<std::string>& kept);

}  // namespace conclave::tool

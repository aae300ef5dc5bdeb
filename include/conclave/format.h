// The forms of quantised weights that tools offer by name, and how checkpoints state them.
#pragma once

#include "conclave/dtype.h"
#include "conclave/error.h"
#include "conclave/spec.h"
#include "conclave/version.h"

#include <optional>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

// A type of weights with one way to scale weights and rows.
struct WeightForm {
  std::string_view name;  // "fp8-block", "int4-group128"
  DType dtype = DType::kBF16;
  QuantSpec quant = {};
  // config.json names the quant_method: "fp8" or "compressed-tensors"; plain types have none.
  std::string_view method = {};
  std::string_view format = {};  // what "compressed-tensors" calls it: "int-quantized"
  std::string_view type = {};    // what its schemes call the codes: "int"
  // Codes fill elements of this type, the lowest bits first, in tensors named "..._packed": kI32, a
  // word of 32 bits, or kU8.
  std::optional<DType> packed_in = {};
  DType scale_dtype = DType::kF32;  // as such checkpoints have scales; kF8E8M0 as bytes
};
// All forms, plain types first.
CONCLAVE_API std::vector<WeightForm> weight_forms();

// Yes if the kernels of a GPU make the rows that a spec has beside weights of this type. Otherwise
// layers there need with_plain_rows: groups of rows have float32 scales in another width than 128,
// or become codes of an unusual type.
CONCLAVE_API Support gpu_rows_support(DType weights, const QuantSpec& quant);

}  // namespace conclave::inline v0

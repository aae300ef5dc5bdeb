#include "quant/weight_format.h"

#include "conclave/tuning.h"

#include <string>

namespace conclave::inline v0 {

std::string tuning_format(DType weight_dtype, const QuantSpec& quant) {
  const quant::WeightFormat* format = quant::find_format(weight_dtype);
  if (format == nullptr) {
    throw Error(ErrorCode::kDType, {.what = "no weights are of this type",
                                    .expected = quant::known_formats(true),
                                    .found = std::string(to_string(weight_dtype))});
  }
  const std::string name(format->name);
  switch (quant.weights) {
    case WeightScale::kNone:
      return name;
    case WeightScale::kTensor:
      return name + ".tensor";
    case WeightScale::kChannel:
      return name + ".channel";
    case WeightScale::kBlock:
      break;
  }
  const QuantSpec usual;
  if (quant.block_rows == usual.block_rows && quant.block_cols == usual.block_cols) {
    return name + ".block";
  }
  return name + ".block" + std::to_string(quant.block_rows) + "x" +
         std::to_string(quant.block_cols);
}

}  // namespace conclave::inline v0

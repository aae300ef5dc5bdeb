#include "core/located.h"
#include "layer/packed_weights.h"
#include "quant/plane_types.h"
#include "spec/layer_weights.h"

#include "conclave/error.h"

#include <string>

namespace conclave::inline v0 {
namespace {

std::string shape_text(int64_t count, int64_t rows, int64_t cols) {
  return std::to_string(count) + " x " + Shape{rows, cols}.to_string();
}

std::string wanted_text(const WeightShape& shape) {
  if (shape.type == quant::PlaneType::kWeights) return std::string(to_string(shape.dtype));
  return quant::show_types(quant::types_of(shape.type));
}

}  // namespace

void check_weights_of(const WeightSource& source, const WeightShape& shape) {
  const WeightInfo info = source.describe(shape.id);
  if (info.count == 0) {
    if (shape.is_optional) return;
    throw Error(ErrorCode::kTensorMissing,
                {.what = "the layer needs weights that its source lacks",
                 .tensor = to_string(shape.id),
                 .expected = shape_text(shape.count, shape.rows, shape.cols)});
  }
  if (info.count != shape.count || info.rows != shape.rows || info.cols != shape.cols) {
    throw Error(ErrorCode::kTensorShape,
                located(source.locate(shape.id, 0),
                        {.what = "weights have another shape than the layer",
                         .expected = shape_text(shape.count, shape.rows, shape.cols),
                         .found = shape_text(info.count, info.rows, info.cols)}));
  }
  if (is_stored_as(shape, info.dtype)) return;
  throw Error(ErrorCode::kTensorDType, located(source.locate(shape.id, 0),
                                               {.what = "weights have another type than the layer",
                                                .expected = wanted_text(shape),
                                                .found = std::string(to_string(info.dtype))}));
}

void check_source(const MoeSpec& spec, const WeightSource& source) {
  for (const WeightShape& shape : layer_weights(spec)) check_weights_of(source, shape);
}

}  // namespace conclave::inline v0

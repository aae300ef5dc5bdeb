#include "core/layer_roles.h"
#include "core/weight_types.h"
#include "layer/packed_weights.h"

#include "conclave/error.h"

#include <string>

namespace conclave::inline v0 {
namespace {

std::string shape_text(int64_t count, int64_t rows, int64_t cols) {
  return std::to_string(count) + " x " + Shape{rows, cols}.to_string();
}

bool fits(DType dtype, const LayerRole& role) {
  switch (role.dtype) {
    case RoleDType::kWeight:
      return dtype == role.weight_dtype;
    case RoleDType::kAnyFloat:
      return is_plain(dtype);
    case RoleDType::kScale:
      return is_plain(dtype) || dtype == DType::kF8E8M0;
    case RoleDType::kIndex:
      break;
  }
  return dtype == DType::kI32 || dtype == DType::kI64;
}

std::string wanted_text(const LayerRole& role) {
  switch (role.dtype) {
    case RoleDType::kWeight:
      return std::string(to_string(role.weight_dtype));
    case RoleDType::kAnyFloat:
      return "F32 or F16 or BF16";
    case RoleDType::kScale:
      return "F32 or F16 or BF16 or F8_E8M0";
    case RoleDType::kIndex:
      break;
  }
  return "I32 or I64";
}

void check_role(const WeightSource& source, const LayerRole& role) {
  const WeightInfo info = source.describe(role.role);
  if (info.count == 0) {
    if (role.optional) return;
    throw Error(ErrorCode::kTensorMissing,
                {.what = "the layer needs weights that its source lacks",
                 .tensor = std::string(to_string(role.role)),
                 .expected = shape_text(role.count, role.rows, role.cols)});
  }
  if (info.count != role.count || info.rows != role.rows || info.cols != role.cols) {
    throw Error(ErrorCode::kTensorShape, {.what = "weights have another shape than the layer",
                                          .tensor = source.locate(role.role, 0),
                                          .expected = shape_text(role.count, role.rows, role.cols),
                                          .found = shape_text(info.count, info.rows, info.cols)});
  }
  if (fits(info.dtype, role)) return;
  throw Error(ErrorCode::kTensorDType, {.what = "weights have another type than the layer",
                                        .tensor = source.locate(role.role, 0),
                                        .expected = wanted_text(role),
                                        .found = std::string(to_string(info.dtype))});
}

}  // namespace

void check_source(const MoeSpec& spec, const WeightSource& source) {
  for (const LayerRole& role : layer_roles(spec)) check_role(source, role);
}

}  // namespace conclave::inline v0

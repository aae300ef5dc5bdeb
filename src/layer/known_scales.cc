#include "layer/known_scales.h"

#include "core/weight_types.h"
#include "quant/scale_type.h"
#include "spec/layer_weights.h"

#include <optional>

namespace conclave::inline v0 {

MoeSpec with_known_scales(const MoeSpec& spec, const WeightSource& source) {
  if (is_plain(spec.weight_dtype) || spec.quant.scale_values != ScaleValues::kFloat) return spec;
  std::optional<DType> type;
  for (const WeightShape& shape : layer_weights(spec)) {
    if (shape.id.plane() != WeightPlane::kScale) continue;
    const WeightInfo info = source.describe(shape.id);
    if (info.count == 0) continue;
    if (type.value_or(info.dtype) != info.dtype) return spec;
    type = info.dtype;
  }
  if (!type || byte_size(*type) != 1) return spec;
  MoeSpec known = spec;
  known.quant.scale_values = quant::values_of_scales(*type);
  return known;
}

}  // namespace conclave::inline v0

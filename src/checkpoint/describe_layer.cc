#include "checkpoint/describe_layer.h"

#include "core/layer_roles.h"

namespace conclave::inline v0::checkpoint {
namespace {

bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

}  // namespace

CheckpointLayer describe_layer(const ModelConfig& config, const LayerConfig& layer,
                               const LayerMap& map) {
  CheckpointLayer result;
  result.index = layer.index;
  result.prefix = map.prefix;
  result.layout = map.layout;
  result.spec = layer.spec;
  result.bytes = map.bytes;
  result.support = map.support;
  const WeightInfo& down = map.role(WeightRole::kDown).info;
  const bool quantised = result.spec.weight_dtype == DType::kF8E4M3;
  if (!quantised && down.count > 0 && is_float(down.dtype)) result.spec.weight_dtype = down.dtype;
  const WeightInfo& router = map.role(WeightRole::kRouter).info;
  if (router.count > 0 && is_float(router.dtype)) {
    set_stored_rounding(config, router.dtype, result.spec.router);
  }
  result.parameters = count_weights(result.spec);
  return result;
}

}  // namespace conclave::inline v0::checkpoint

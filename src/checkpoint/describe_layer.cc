#include "checkpoint/describe_layer.h"

#include "core/weight_types.h"
#include "spec/layer_weights.h"

namespace conclave::inline v0::checkpoint {

CheckpointLayer describe_layer(const ModelConfig& config, const LayerConfig& layer,
                               const LayerMap& map) {
  CheckpointLayer result;
  result.index = layer.index;
  result.prefix = map.prefix;
  result.layout = map.layout;
  result.spec = layer.spec;
  result.bytes = map.bytes;
  result.support = map.support;
  const WeightInfo& down = map.stored[weights::kDown].info;
  const bool quantised = !is_plain(result.spec.weight_dtype);
  if (!quantised && down.count > 0 && is_plain(down.dtype)) result.spec.weight_dtype = down.dtype;
  const WeightInfo& residual = map.stored[weights::kResidualDown].info;
  const bool is_apart = residual.count > 0 && residual.dtype != result.spec.weight_dtype;
  if (!quantised && is_apart && is_plain(residual.dtype)) {
    result.spec.residual.weight_dtype = residual.dtype;
  }
  const WeightInfo& router = map.stored[weights::kRouter].info;
  if (router.count > 0 && is_plain(router.dtype)) {
    set_stored_rounding(config, router.dtype, result.spec.router);
  }
  result.parameters = count_weights(result.spec);
  return result;
}

}  // namespace conclave::inline v0::checkpoint

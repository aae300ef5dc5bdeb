#include "checkpoint/model_layers.h"

#include "checkpoint/layer_sizes.h"

namespace conclave::inline v0::checkpoint {

ModelLayers map_model(const io::JsonValue& root, const TensorTable& table, ExtraLayers extra,
                      ModelConfig& config) {
  const LayerTensors tensors = group_by_layer(config, table, extra);
  add_extra_layers(root, tensors.extra_layers(), config);
  settle_experts(tensors, table, config);
  settle_by_file(tensors, table, config);
  settle_quantization(tensors, table, config);
  const auto map = config.quantization.empty() ? map_layers : survey_layers;
  return {.maps = map(config, table, tensors), .notes = tensors.notes};
}

}  // namespace conclave::inline v0::checkpoint

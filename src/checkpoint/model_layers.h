// The MoE layers of a model whose configuration has been read and whose tensors are listed.
#pragma once

#include "checkpoint/layer_map.h"
#include "checkpoint/layer_tensors.h"
#include "checkpoint/model_config.h"
#include "checkpoint/tensor_table.h"
#include "io/json.h"

#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

struct ModelLayers {
  std::vector<LayerMap> maps;      // in the order of ModelConfig::layers
  std::vector<std::string> notes;  // about names of tensors
};

// Completes `config`, which was read from `root`, by what the tensors say, and maps every layer.
// Throws as map_layers, and Error(kTensorShape).
ModelLayers map_model(const io::JsonValue& root, const TensorTable& table, ExtraLayers extra,
                      ModelConfig& config);

}  // namespace conclave::inline v0::checkpoint

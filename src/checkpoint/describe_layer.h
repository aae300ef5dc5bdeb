// Describes an opened layer for the public list of layers.
#pragma once

#include "checkpoint/layer_map.h"
#include "checkpoint/model_config.h"

#include "conclave/checkpoint.h"

namespace conclave::inline v0::checkpoint {

// The spec is that of the configuration, completed by what the tensors say.
CheckpointLayer describe_layer(const ModelConfig& config, const LayerConfig& layer,
                               const LayerMap& map);

}  // namespace conclave::inline v0::checkpoint

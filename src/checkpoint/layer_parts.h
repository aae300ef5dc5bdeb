// Layers whose modules have several schemes: which tensors belong to which, and the layer's form.
#pragma once

#include "checkpoint/layer_map.h"
#include "checkpoint/layer_tensors.h"
#include "checkpoint/model_config.h"
#include "checkpoint/tensor_table.h"

#include <optional>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

// The tensors of a layer whose modules have the same scheme.
struct LayerPart {
  // One of the model's schemes; null: modules of values, and all that is no module.
  const std::optional<QuantizedWeights>* quant = nullptr;
  std::vector<LayerTensor> items = {};
};

// Decides the form of a layer of a model whose modules have schemes of their own: that of its
// experts if they have one, otherwise one that holds all of theirs. `layer` has the spec without
// quantisation. Throws NotRead if experts have a scheme that is not read, and as map_layers.
struct PartsVerdict {
  bool is_mixed = false;
  bool keeps_rows = true;  // false: rows stay as they are, where some file asks for codes
};
PartsVerdict settle_parts(const ModelConfig& config, const TensorTable& table,
                          const LayerTensors& tensors, LayerConfig& layer);

// Maps a layer that settle_parts found to be mixed. Throws as map_layers.
LayerMap map_parts(const ModelConfig& config, const TensorTable& table, const LayerTensors& tensors,
                   const LayerConfig& layer);
// The names of what it lacks, at most `limit`.
std::vector<std::string> missing_of_parts(const ModelConfig& config, const TensorTable& table,
                                          const LayerTensors& tensors, const LayerConfig& layer,
                                          size_t limit);

}  // namespace conclave::inline v0::checkpoint

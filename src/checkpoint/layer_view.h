// A layer whose tensors are looked for: what it may have, and the tensors that are there.
#pragma once

#include "checkpoint/layer_shapes.h"
#include "checkpoint/layer_tensors.h"
#include "checkpoint/model_config.h"
#include "checkpoint/placement.h"
#include "checkpoint/stored_planes.h"
#include "checkpoint/tensor_table.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace conclave::inline v0::checkpoint {

struct LayerView {
  const ModelConfig& config;
  const TensorTable& table;
  const LayerConfig& layer;
  const std::optional<QuantizedWeights>& quant;
  std::span<const LayerTensor> items;
  LayerShapes shapes;
  std::string prefix;        // "model.layers.0."
  int64_t first_expert = 0;  // the number that expert 0 has in names
};
// All arguments must outlive the view.
LayerView view_layer(const ModelConfig& config, const TensorTable& table,
                     const LayerTensors& tensors, const LayerConfig& layer);

// Whether the layer has all that the pattern means: the same name has other meanings elsewhere.
bool is_wanted(const LayerView& view, const NamePattern& pattern);

// The content of the tensor that the pattern means, or of the one with a plane of its matrices.
TensorBlock block_of(const LayerView& view, const NamePattern& pattern,
                     std::optional<WeightPlane> plane = std::nullopt);
// The same as the method of a quantised model stores it.
WantedPlane wanted_plane(const LayerView& view, const NamePattern& pattern,
                         const TensorBlock& block);
// The method's row for such a plane; null where the usual names count.
const StoredPlane* expected_row(const LayerView& view, const NamePattern& pattern,
                                std::optional<WeightPlane> plane);

}  // namespace conclave::inline v0::checkpoint

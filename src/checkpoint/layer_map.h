// Finds the tensor, and the part of it, that holds each matrix of each MoE layer.
#pragma once

#include "checkpoint/layer_tensors.h"
#include "checkpoint/model_config.h"
#include "checkpoint/placement.h"
#include "checkpoint/stored_planes.h"
#include "checkpoint/tensor_table.h"

#include "conclave/error.h"
#include "conclave/weights.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

struct StoredMatrices {
  WeightInfo info;
  std::vector<MatrixLocation> matrices;  // info.count of them
};

struct LayerMap {
  int64_t index = 0;
  std::string prefix;  // "model.layers.0.mlp."
  std::string layout;  // "per_expert", "stacked", "stacked_transposed", ...
  WeightTable<StoredMatrices> stored;
  std::vector<PlaneReading> readings;  // planes that a method stores in its own way
  uint64_t bytes = 0;                  // in the tensors that are used
  Support support = Support::yes();
  // Set for a layer in several forms: `stored` says what is read; each part holds some matrices
  // and leaves the rest empty.
  std::vector<LayerMap> parts = {};
  QuantSpec quant = {};                                   // what codes in `stored` mean
  std::optional<QuantizedWeights> scheme = std::nullopt;  // set for a part with codes
};

// One entry per MoE layer of `config`, in its order. Every matrix has exactly one tensor of the
// right shape, and no tensor of a MoE block is left over. Throws Error(kTensorMissing,
// kTensorUnexpected, kTensorDuplicate, kTensorShape, kTensorDType).
std::vector<LayerMap> map_layers(const ModelConfig& config, const TensorTable& table,
                                 const LayerTensors& tensors);

// The map of one layer of `config`; other layers may still be incomplete. Throws as map_layers.
LayerMap map_layer(const ModelConfig& config, const TensorTable& table, const LayerTensors& tensors,
                   const LayerConfig& layer);
// At most `limit` tensors that the layer lacks, as "NAME [rows, cols]". Throws
// Error(kTensorDuplicate, kTensorShape, kTensorUnexpected).
std::vector<std::string> missing_tensors(const ModelConfig& config, const TensorTable& table,
                                         const LayerTensors& tensors, const LayerConfig& layer,
                                         size_t limit);

// Does what map_layers does, without the matrices: for weights with the names and shapes of a
// quantisation method.
std::vector<LayerMap> survey_layers(const ModelConfig& config, const TensorTable& table,
                                    const LayerTensors& tensors);

}  // namespace conclave::inline v0::checkpoint

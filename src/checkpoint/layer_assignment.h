// Assigns the tensors of one MoE layer to its matrices: every matrix gets exactly one tensor.
#pragma once

#include "checkpoint/layer_map.h"
#include "checkpoint/layer_planes.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

// The findings, step by step: each step reads those before it. LayerMatches explains the rest.
struct LayerAssignment {
  LayerView view;
  LayerLayout layout;
  LayerPlanes planes;
  std::vector<int32_t> strays;
  std::string foreign;
  uint64_t bytes = 0;
};
// Assigns all tensors it can. Throws as place_tensors. All arguments but `usual`, which is as for
// choose_layout, must outlive the assignment.
LayerAssignment assign_layer(const ModelConfig& config, const TensorTable& table,
                             const LayerTensors& tensors, const LayerConfig& layer,
                             const LayerNaming& usual);

// The map of a layer that lacks nothing. Throws Error(kTensorDType) if types differ that must
// agree.
LayerMap finish_map(LayerAssignment assignment);

}  // namespace conclave::inline v0::checkpoint

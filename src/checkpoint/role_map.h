// Which tensor, and which part of it, holds each matrix of each MoE layer.
#pragma once

#include "checkpoint/layer_tensors.h"
#include "checkpoint/model_config.h"
#include "checkpoint/shard_index.h"

#include "conclave/error.h"
#include "conclave/weights.h"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

inline constexpr size_t kNumRoles = kNumWeightRoles;

// Element (row, col) of the matrix is element offset + row * row_stride + col * col_stride of the
// tensor. One of the strides is 1.
struct MatrixLocation {
  int32_t tensor = -1;  // index into ShardSet::tensors; -1: not found
  int64_t offset = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
};

struct RoleMatrices {
  WeightInfo info;
  std::vector<MatrixLocation> matrices;  // info.count of them
};

struct LayerMap {
  int64_t index = 0;
  std::string prefix;  // "model.layers.0.mlp."
  std::string layout;  // "per_expert", "stacked", "stacked_transposed"
  std::array<RoleMatrices, kNumRoles> roles;
  uint64_t bytes = 0;  // of the tensors used
  Support support = Support::yes();

  const RoleMatrices& role(WeightRole role) const { return roles[static_cast<size_t>(role)]; }
};

// One entry a MoE layer of `config`, in its order. Every matrix has exactly one tensor of the right
// shape, and no tensor of a MoE block is left over. Throws Error(kTensorMissing, kTensorUnexpected,
// kTensorDuplicate, kTensorShape, kTensorDType).
std::vector<LayerMap> map_roles(const ModelConfig& config, const ShardSet& shards,
                                const LayerTensors& tensors);

// The same without roles, for weights whose names and shapes belong to a quantisation method.
std::vector<LayerMap> survey_layers(const ModelConfig& config, const ShardSet& shards,
                                    const LayerTensors& tensors);

}  // namespace conclave::inline v0::checkpoint

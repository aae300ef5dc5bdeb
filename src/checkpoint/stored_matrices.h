// The names of a layer's matrices of experts: of the tensors that hold them, and of linear layers.
#pragma once

#include "checkpoint/layer_map.h"
#include "checkpoint/model_config.h"
#include "checkpoint/tensor_table.h"

#include "conclave/checkpoint.h"

#include <vector>

namespace conclave::inline v0::checkpoint {

std::vector<StoredMatrix> name_matrices(const ModelConfig& config, const TensorTable& table,
                                        const LayerMap& layer);

}  // namespace conclave::inline v0::checkpoint

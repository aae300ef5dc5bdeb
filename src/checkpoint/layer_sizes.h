// Numbers of experts that the tensors say and the configuration does not: pruned models may have
// other ones in each layer.
#pragma once

#include "checkpoint/layer_tensors.h"
#include "checkpoint/model_config.h"
#include "checkpoint/tensor_table.h"

namespace conclave::inline v0::checkpoint {

// Where the routers of layers have different numbers of rows, a layer has as many experts as its
// router has rows, if it stores just as many. One number that differs from the configuration's in
// all layers is left to those who find experts missing: file and configuration do not belong
// together. Throws Error(kTensorShape) for fewer experts than a token chooses.
void settle_experts(const LayerTensors& tensors, const TensorTable& table, ModelConfig& config);

}  // namespace conclave::inline v0::checkpoint

// Describes the MoE layers of a GGUF file as a model directory of Hugging Face: the inverse of
// gguf_layers.
#pragma once

#include "conclave/checkpoint.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0 {

// A tensor of a layer: one matrix or vector. Routed experts have tensors of their own.
struct DirectoryTensor {
  std::string name;  // "model.layers.3.mlp.experts.7.up_proj.weight"
  int64_t layer = 0;
  WeightId id = weights::kUp;
  int64_t expert = 0;
  std::vector<int64_t> shape;
};

struct DirectoryLayers {
  std::string model_type;
  std::string config;  // the text of config.json
  std::vector<DirectoryTensor> tensors;
};

// The tensors of these MoE layers of a GGUF file by the names of a family, and the configuration
// from which this family's table reads layers that mean the same. Of several families that
// llama.cpp makes files of one architecture from, the first that can say it is taken. Throws
// Error(kUnsupported), with the first property that differs for each, if none can, and for weights
// without a name in the family.
CONCLAVE_API DirectoryLayers directory_layers(const Checkpoint& model,
                                              std::span<const int64_t> layers);

}  // namespace conclave::inline v0

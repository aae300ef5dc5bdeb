// Describes the MoE layers of a GGUF file as a model directory of Hugging Face: the inverse of
// gguf_layers.
#pragma once

#include "conclave/checkpoint.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0 {

// A tensor of a layer: one matrix or vector, or a stack: of each expert in turn its matrix, and
// below it the other one.
struct DirectoryTensor {
  std::string name;  // "model.layers.3.mlp.experts.7.up_proj.weight"
  int64_t layer = 0;
  WeightId id = weights::kUp;
  std::optional<WeightId> other = {};
  int64_t expert = 0;   // the first
  int64_t experts = 1;  // that the tensor has
  std::vector<int64_t> shape;
};

// Whether routed experts have tensors of their own, as quantised models are published, or lie as
// the family is published: in stacks where it has nothing else, unless these lie columns first.
enum class DirectoryStacks : uint8_t { kNone, kAsPublished };

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
                                              std::span<const int64_t> layers,
                                              DirectoryStacks stacks = DirectoryStacks::kNone);

}  // namespace conclave::inline v0

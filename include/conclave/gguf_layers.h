// A GGUF file says this of the MoE layers of a model: the inverse of Checkpoint::open for such
// files.
#pragma once

#include "conclave/checkpoint.h"
#include "conclave/gguf.h"
#include "conclave/spec.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0 {

// A tensor of a layer: all matrices that WeightSource has of `id`, one after the other.
struct GgufLayerTensor {
  std::string name;  // "blk.3.ffn_up_exps.weight"
  int64_t layer = 0;
  WeightId id = weights::kUp;
  std::vector<int64_t> shape;  // the length of a row is last
};

struct GgufLayers {
  std::string architecture;  // llama.cpp's name for the family
  std::vector<GgufKey> keys;
  std::vector<GgufLayerTensor> tensors;
};

// The tensors and keys of these MoE layers by llama.cpp's names. Throws Error(kUnsupported) for a
// family without such names here, and for parts of a layer that no GGUF file says.
CONCLAVE_API GgufLayers gguf_layers(const Checkpoint& model, std::span<const int64_t> layers);

// Whether a layer that was read from such a file means what the model's means, but for what no GGUF
// file says: types of weights, the rounding of a router, the value of a dropped group, and what is
// added to a sum that weights are divided by. No, with the first property that differs.
CONCLAVE_API Support means_the_same(const MoeSpec& model, const MoeSpec& file);

}  // namespace conclave::inline v0

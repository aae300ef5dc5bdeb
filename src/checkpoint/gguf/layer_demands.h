// Finds what layers of a GGUF file have, by its architecture and keys, wherever a layer without
// the tensor would be another valid layer: one without a gate, a bias, shared experts, or
// any experts.
#pragma once

#include "checkpoint/gguf/family.h"
#include "checkpoint/gguf/keys.h"
#include "checkpoint/gguf/layer_tensors.h"
#include "checkpoint/gguf/model_facts.h"
#include "checkpoint/gguf/tensor_table.h"

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace conclave::inline v0::checkpoint {

class GgufLayerRules {
 public:
  // Both must outlive it.
  GgufLayerRules(const GgufModel& model, const GgufTensorTable& tensors);

  // Whether a key says that block `index` comes before those with experts.
  bool is_dense_by_key(int64_t index) const;
  // Whether block `index` is a MoE layer, as far as the tensors tell that there are. Throws
  // Error(kConfigValue) if a key says that it is dense and it has experts.
  bool has_experts(int64_t index) const;
  // Says what such a layer has. Throws Error(kConfigValue).
  GgufDemands demands_of(int64_t index) const;

 private:
  bool any_block_has(std::string_view name) const;
  bool has_shared(int64_t index) const;
  const routing::RouterTensor* router_tensor_of(int64_t index) const;
  bool has_selection_bias(int64_t index) const;
  bool has_factor(int64_t index, std::string_view matrix) const;

  const GgufKeys& keys_;
  const GgufFamily& family_;
  const GgufTensorTable& tensors_;
  int64_t num_layers_;
  int64_t num_blocks_;
  int64_t num_dense_ = 0;  // blocks at the begin, where a key counts them
  bool some_have_selection_bias_ = false;
  GgufDemands same_;  // what is the same for all layers
  // Whether stacks of a matrix and a type have factors.
  mutable std::map<std::pair<std::string, const io::GgufType*>, bool> factors_;
};

}  // namespace conclave::inline v0::checkpoint

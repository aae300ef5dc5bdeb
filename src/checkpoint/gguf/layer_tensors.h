// Finds the tensors of a MoE layer in a GGUF file, and what sizes they give the layer.
#pragma once

#include "checkpoint/gguf/tensor_table.h"
#include "routing/router_tensors.h"

#include "conclave/weights.h"

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

// A matrix: rows of a tensor from `first_row` on, where a row is what lies along its last axis.
struct GgufMatrix {
  GgufPlace place;
  int64_t first_row = 0;
};

struct GgufStored {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<GgufMatrix> matrices;
};

struct GgufLayer {
  int64_t index = 0;
  std::string prefix;  // "blk.3."
  std::string layout;  // "stacked", "stacked_fused", "per_expert"
  int64_t num_experts = 0;
  WeightTable<GgufStored> stored;
  // One factor for each expert, of the products of gate, up and down; often absent.
  GgufMatrix gate_factor;
  GgufMatrix up_factor;
  GgufMatrix down_factor;
  uint64_t bytes = 0;  // what the tensors that are used take

  bool has(WeightId id) const { return !stored[id].matrices.empty(); }
  int64_t rows(WeightId id) const { return stored[id].rows; }
};

// The keys of the model give the sizes that the shapes of all layers follow.
struct GgufSizes {
  int64_t num_experts = 0;
  int64_t hidden_size = 0;
  bool has_residual = false;       // ffn_gate, ffn_up and ffn_down belong to the layer
  bool scales_experts = false;     // ffn_down_exps.scale is the router's scale of experts
  bool normalises_router = false;  // ffn_gate_inp.scale is the weight of its norm
};

// A layer has this by its model's architecture and keys: the tensors must be there.
struct GgufDemands {
  const routing::RouterTensor* router_tensor = nullptr;  // null: none
  bool gate = false;                                     // routed and shared experts have one
  bool shared = false;
  bool shared_gate = false;  // shared experts, if there are some, have a factor
  bool selection_bias = false;
  bool biases = false;
  bool expert_scale = false;
  bool projections = false;
  bool gate_factor = false;
  bool up_factor = false;
  bool down_factor = false;
};

// Throws Error(kTensorMissing, kTensorShape, kTensorDType, kTensorUnexpected) naming the tensor.
GgufLayer find_layer_tensors(const GgufTensorTable& tensors, int64_t index, const GgufSizes& sizes,
                             const GgufDemands& demands);

// Collects what is known of a layer while its tensors come one by one.
struct GgufLayerSoFar {
  struct Missing {
    std::string name;
    std::string dims;  // "[rows, cols]", with "?" for a size that is not known
  };

  std::set<std::string_view> used;  // names of tensors that the layer has a use for
  std::vector<Missing> missing;
};
// Throws as find_layer_tensors, but for tensors that have not come yet.
GgufLayerSoFar find_tensors_so_far(const GgufTensorTable& tensors, int64_t index,
                                   const GgufSizes& sizes, const GgufDemands& demands);

}  // namespace conclave::inline v0::checkpoint

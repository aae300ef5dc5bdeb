// Finds the tensors of a MoE layer in a GGUF file, and what sizes they give the layer.
#pragma once

#include "io/gguf/file.h"
#include "routing/router_tensors.h"

#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

// A matrix: rows of a tensor from `first_row` on, where a row is what lies along its last axis.
struct GgufMatrix {
  io::GgufFile::Place place;
  int64_t first_row = 0;
  std::span<const std::byte> bytes = {};  // the tensor, if it is in memory: its place has no part
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

// The keys of the file give the sizes that the shapes of all layers follow.
struct GgufSizes {
  int64_t num_experts = 0;
  int64_t hidden_size = 0;
  bool has_residual = false;       // ffn_gate, ffn_up and ffn_down belong to the layer
  bool scales_experts = false;     // ffn_down_exps.scale is the router's scale of experts
  bool normalises_router = false;  // ffn_gate_inp.scale is the weight of its norm
};

// A layer has this by its file's architecture and keys: the tensors must be there.
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

// The tensors of each layer by its prefix, such as "blk.3.", sorted by name. Names and places are
// the file's.
using GgufTensorsByLayer = std::map<std::string_view, std::vector<io::GgufFile::Place>>;
GgufTensorsByLayer sort_by_layer(const io::GgufFile& file);

bool has_tensors(const GgufTensorsByLayer& by_layer, int64_t index);
// The tensor whose name is `rest` behind the layer's prefix; empty if there is none.
io::GgufFile::Place find_tensor(const GgufTensorsByLayer& by_layer, int64_t index,
                                std::string_view rest);
// Any tensor of a router or of experts; empty if the layer has none.
io::GgufFile::Place find_expert_tensor(const GgufTensorsByLayer& by_layer, int64_t index);

// Throws Error(kTensorMissing, kTensorShape, kTensorDType, kTensorUnexpected) naming the tensor.
GgufLayer find_layer_tensors(const io::GgufFile& file, const GgufTensorsByLayer& by_layer,
                             int64_t index, const GgufSizes& sizes, const GgufDemands& demands);

}  // namespace conclave::inline v0::checkpoint

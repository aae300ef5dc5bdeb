// Finds the tensors of a MoE layer in a GGUF file, and what sizes they give the layer.
#pragma once

#include "io/gguf/file.h"

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

// The tensors of each layer by its prefix, such as "blk.3.", sorted by name. Names and places are
// the file's.
using GgufTensorsByLayer = std::map<std::string_view, std::vector<io::GgufFile::Place>>;
GgufTensorsByLayer sort_by_layer(const io::GgufFile& file);

// Whether layer `index` has a router and experts.
bool has_experts(const GgufTensorsByLayer& by_layer, int64_t index);

// Throws Error(kTensorMissing, kTensorShape, kTensorDType, kTensorUnexpected) naming the tensor.
GgufLayer find_layer_tensors(const io::GgufFile& file, const GgufTensorsByLayer& by_layer,
                             int64_t index, const GgufSizes& sizes);

}  // namespace conclave::inline v0::checkpoint

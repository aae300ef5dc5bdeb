// Describes a model for a plan: the specs of its MoE layers and the bytes of their weights.
#pragma once

#include "plan/compute_model.h"

#include "conclave/spec.h"
#include "conclave/weights.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::tool {

// Bytes of a layer's weights as its source has them, scales included.
struct LayerBytes {
  double expert = 0;  // one routed expert
  double shared = 0;  // what tensor parallelism splits too: shared experts, residual MLP
  double whole = 0;   // what every rank holds: router, projections, vectors
};
LayerBytes layer_bytes(const MoeSpec& spec, const WeightSource& source);

struct ModelLayer {
  int64_t index = 0;
  MoeSpec spec;
  LayerBytes bytes = {};
};

struct PlannedModel {
  std::string name = {};
  std::string model_type = {};
  std::vector<ModelLayer> layers = {};
  // Each rank holds the rest of the model whole; 0 where nothing is known of it.
  double other_bytes = 0;

  const MoeSpec& spec() const { return layers.front().spec; }
  // Throws Error(kLayerNotFound).
  const ModelLayer& layer(int64_t index) const;
};

// The sizes of a layer's experts on one of `tp` ranks, and of what every token uses beside them.
struct LayerSizes {
  ExpertSize expert;
  std::vector<ExpertSize> common;  // shared experts and the residual MLP
};
LayerSizes layer_sizes(const ModelLayer& layer, int32_t tp);

// Returns "1.50 GB" for bytes that were computed, and may exceed all memories.
std::string real_bytes_text(double bytes);

// Bytes of one rank's weights over all layers, with `slots` experts in each.
double rank_weight_bytes(const PlannedModel& model, int64_t redundant_experts, int32_t ep,
                         int32_t tp);

// Memory that a forward needs beside weights, as an estimate: rows that come and go, rows of slots
// between the products and behind them, and float32 sums.
struct WorkspaceRows {
  double own_tokens = 0;
  double received_rows = 0;
  double slot_rows = 0;
  double row_bytes = 0;  // a row that travels
};
double workspace_bytes(const MoeSpec& spec, int32_t tp, const WorkspaceRows& rows);

}  // namespace conclave::tool

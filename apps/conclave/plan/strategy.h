// The ways to split a layer over a cluster that a plan compares. A group of GPUs serves its own
// tokens; a cluster has as many groups as fit. Attention is data parallel and not part of a plan.
#pragma once

#include "plan/cluster.h"
#include "plan/exchange_model.h"

#include "conclave/balance.h"
#include "conclave/spec.h"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace conclave::tool {

struct Strategy {
  int32_t ep = 1;
  int32_t tp = 1;
  // "linear", "round_robin", or a rule of balance_rules(); empty without expert parallelism.
  std::string placement = {};
  int32_t redundant_experts = 0;

  int32_t group() const { return ep * tp; }
  bool is_balanced() const;
  // "EP 8 global +8", "EP 4 x TP 2 linear", "TP 8", "1 GPU".
  std::string name() const;
};

// The nodes that a group spans. Ranks of a tensor group are neighbours.
GroupShape group_shape(const Cluster& cluster, const Strategy& strategy);
// The same of the ranks between which rows travel: one of each tensor group.
GroupShape expert_group_shape(const Cluster& cluster, const Strategy& strategy);

// Tensor parallel in a node and over all; expert parallel in a node, over 2, 4, 8 ... nodes and
// over all, by every rule and with none, one or as many replicas again for each slot of a rank;
// both together. What a rule cannot do is left out: hierarchical without nodes and groups is
// global.
std::vector<Strategy> candidate_strategies(const Cluster& cluster, const MoeSpec& spec);

// The slots of a layer whose experts had `load`, [E] rows. Throws as balance_experts.
ExpertSlots place_experts(const Strategy& strategy, const Cluster& cluster, const MoeSpec& spec,
                          std::span<const double> load);

}  // namespace conclave::tool

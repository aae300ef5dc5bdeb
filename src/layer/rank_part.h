// The part of a layer that one rank holds and adds: its experts, its slices, its share of the rest.
#pragma once

#include "placement/epoch.h"

#include "conclave/context.h"
#include "conclave/error.h"
#include "conclave/placement.h"
#include "conclave/spec.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace conclave::inline v0 {

struct RankPart {
  // Derived here, read by everything that asks where an expert lies.
  std::shared_ptr<const PlacementEpoch> epoch;
  std::vector<int32_t> local_experts;  // logical expert of each local one, at first
  int32_t num_spare = 0;               // places behind these

  // Columns of the intermediate size: routed experts, shared experts and the residual MLP.
  TensorSlice inner;
  TensorSlice shared_inner;
  TensorSlice residual_inner;

  // A part that is not split counts once in a partial result: on the rank that holds it.
  bool holds_dense = true;  // shared experts and residual MLP, or their slice
  bool adds_rest = true;    // output bias and zero experts
  bool adds_down_bias = true;
  // Adds up the slices' sums; null if there are no slices, or if the caller adds them.
  Communicator* tensor_communicator = nullptr;
  // Gathers rows at their experts on the device, and brings sums home; null on the CPU, and where
  // rows stay on their rank.
  Communicator* expert_communicator = nullptr;
  // A forward asks the other ranks whether they have as many tokens; one that only enqueues cannot.
  bool asks_ranks = true;

  const ExpertPlacement& placement() const { return epoch->experts; }
  const ReplicaMap& replicas() const { return epoch->replicas; }
  bool has_replicas() const { return epoch->has_replicas(); }
  int64_t num_places() const { return static_cast<int64_t>(local_experts.size()) + num_spare; }
  bool reduces() const { return tensor_communicator != nullptr; }
  bool gathers() const { return expert_communicator != nullptr; }
};

// Plans everything except the communicator. `parallel` is valid. Throws Error(kInvalidArgument) if
// the placement does not fit the experts.
RankPart plan_rank_part(const MoeSpec& spec, const ParallelSpec& parallel, int32_t num_spare = 0);

// Yes if the context's tensor communicator, which may be null, can add up the slices of
// tensor-parallel ranks.
Support tensor_reduction_supports(const Communicator* communicator, const ParallelSpec& parallel);

// For the plan: "3 of 8 experts on rank 1 of 3; columns 0 to 22 of 45 on rank 0 of 2".
std::string describe_part(const RankPart& part, const MoeSpec& spec, const ParallelSpec& parallel);

}  // namespace conclave::inline v0

// Where a layer's experts lie from one forward to the next: one numbered map, derived once, which
// the layer's plan, its dispatcher and the choice of replicas all read. Other experts' places are
// another epoch, taken up by every rank between the same two forwards.
#pragma once

#include "conclave/error.h"
#include "conclave/placement.h"
#include "conclave/spec.h"

#include <cstdint>
#include <memory>

namespace conclave::inline v0 {

struct PlacementEpoch {
  uint64_t number = 0;      // 0: the places that the layer was created with
  ExpertPlacement experts;  // physical expert to rank and index there
  ReplicaMap replicas;      // logical expert to physical ones; empty without redundant experts

  bool has_replicas() const { return experts.num_physical() > experts.num_experts; }
};

// Throws Error(kInvalidArgument) if the placement does not fit the experts.
std::shared_ptr<const PlacementEpoch> first_epoch(int64_t num_experts,
                                                  const ParallelSpec& parallel);

// Yes if `next` can take the place of `planned`, by which memory was booked: the same experts and
// ranks, and on no rank more experts than planned.
Support can_follow(const PlacementEpoch& planned, const PlacementEpoch& next);

}  // namespace conclave::inline v0

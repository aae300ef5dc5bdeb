// Where a layer's experts lie from one forward to the next: one numbered map, derived once, which
// the layer's plan, its dispatcher and the choice of replicas all read. Other experts' places are
// another epoch, taken up by every rank between the same two forwards.
#pragma once

#include "conclave/balance.h"
#include "conclave/error.h"
#include "conclave/placement.h"
#include "conclave/spec.h"

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace conclave::inline v0 {

// A place holds the weights of one expert, or nothing. Every rank knows the places of all.
struct PlaceTable {
  int64_t num_experts = 0;  // E
  int64_t num_slots = 0;    // at most so many places are in use at once: E + R of the plan
  int32_t num_spare = 0;    // on each rank, beside the places of the first placement
  // Each rank has one place more, after its others, that a layer cannot address: experts pass
  // through it where no other is free.
  bool has_temporary = false;
  std::vector<std::vector<int32_t>> experts = {};  // [ranks][places] logical expert, -1: free

  int32_t num_ranks() const { return static_cast<int32_t>(experts.size()); }
  std::span<const int32_t> of_rank(int32_t rank) const {
    return experts[static_cast<size_t>(rank)];
  }
  // Places that a layer addresses.
  int32_t addressable(int32_t rank) const {
    return static_cast<int32_t>(of_rank(rank).size()) - (has_temporary ? 1 : 0);
  }
  // A placement gives a rank at most so many experts: one spare place stays free for moves.
  int32_t most_experts(int32_t rank) const { return addressable(rank) - (num_spare > 0 ? 1 : 0); }
  bool is_addressable() const;  // no expert lies in a temporary place
};

struct PlacementEpoch {
  uint64_t number = 0;      // 0: the places that the layer was created with
  ExpertPlacement experts;  // physical expert to rank and place there
  ReplicaMap replicas;      // logical expert to physical ones; empty without redundant experts
  PlaceTable places;
  int64_t key = 0;  // equal for equal places, from 0 to 2^62

  // As planned: an epoch between two others may have fewer replicas, or none.
  bool has_replicas() const { return !replicas.first.empty(); }
};

// Throws Error(kInvalidArgument) if the placement does not fit the experts.
std::shared_ptr<const PlacementEpoch> first_epoch(int64_t num_experts, const ParallelSpec& parallel,
                                                  int32_t num_spare = 0);
// The epoch in which experts lie as the table says. The first place of expert e, by rank and place,
// becomes physical expert e.
std::shared_ptr<const PlacementEpoch> epoch_of_places(uint64_t number, PlaceTable places);

// The experts of each rank, in the order of their places.
ExpertSlots slots_of(const PlaceTable& places);

// Equal for equal slots and most probably different for others, from 0 to 2^62.
int64_t key_of(const ExpertSlots& slots);

// Yes if `next` can take the place of `planned`, by which memory was booked: the same experts and
// ranks, not more physical experts, and on no rank more places than planned.
Support can_follow(const PlacementEpoch& planned, const PlacementEpoch& next);

}  // namespace conclave::inline v0

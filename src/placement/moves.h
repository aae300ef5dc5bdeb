// The way from one placement to another: which experts travel between which places, in rounds that
// each leave every expert somewhere. A pure function, so that ranks need not send each other the
// answer.
#pragma once

#include "placement/epoch.h"

#include "conclave/balance.h"
#include "conclave/error.h"

#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

// The weights of a place are copied to a free one, perhaps of the same rank.
struct ExpertMove {
  int32_t expert = 0;
  int32_t from_rank = 0;
  int32_t from_place = 0;
  int32_t to_rank = 0;
  int32_t to_place = 0;
};

// Moves of one round read places that are in use and write free ones, so that forwards may go on
// until all ranks take up `after` between two of them.
struct MoveRound {
  std::vector<ExpertMove> moves;
  PlaceTable after;
};

// Yes if a layer with these places can have `slots`: the same experts and ranks, on no rank more
// than PlaceTable::most_experts, each expert that lies somewhere now in one slot at least.
Support can_hold(const PlaceTable& places, const ExpertSlots& slots);

// The rounds from `places` to `slots`, none if nothing changes. An expert that stays on its rank
// keeps its place. Where experts change places in a circle and no place is free, temporary places
// serve, if `with_temporary`: then a layer cannot run between these rounds. Throws
// Error(kInvalidArgument) as can_hold says, Error(kUnsupported) for a circle without any free
// place.
std::vector<MoveRound> plan_moves(const PlaceTable& places, const ExpertSlots& slots,
                                  bool with_temporary);

}  // namespace conclave::inline v0

// Logical expert -> (rank, local slot), and back. Pure functions.
#pragma once

#include "conclave/spec.h"

#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0::placement {

struct ExpertPlacement {
  int32_t num_ranks = 1;
  std::vector<int32_t> rank_of;                  // [E]
  std::vector<int32_t> local_of;                 // [E] index among its rank's experts
  std::vector<std::vector<int32_t>> experts_of;  // [ranks] logical ids, ascending local index

  // [E]: the local index on `rank`, -1 for experts of other ranks.
  std::vector<int32_t> expert_map(int32_t rank) const;
};

// Every expert on exactly one rank; ranks beyond E hold none. Throws Error(kInvalidArgument).
ExpertPlacement make_placement(int64_t num_experts, int32_t num_ranks, PlacementStrategy strategy);

}  // namespace conclave::inline v0::placement

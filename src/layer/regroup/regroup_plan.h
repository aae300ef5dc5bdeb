// Which rank gives what to which when a layer is taken to other ranks. A pure function of what all
// ranks know of each other.
#pragma once

#include "placement/moves.h"

#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0 {

// One rank of everyone concerned.
struct RegroupRank {
  bool holds = false;                // it has the layer before
  int32_t next_rank = -1;            // in the new group; -1: it leaves
  int32_t next_size = 0;             // ranks of that group
  bool has_source = false;           // it can read experts that nobody has
  std::vector<int32_t> held = {};    // the expert in each place before, -1 for none
  std::vector<int32_t> wanted = {};  // the expert of each place afterwards

  bool joins() const { return !holds && next_rank >= 0; }
};

struct RegroupMoves {
  std::vector<ExpertMove> experts;          // from places before to places afterwards
  std::vector<ExpertMove> rest;             // to ranks that join, of what every rank has: expert -1
  std::vector<std::vector<int32_t>> reads;  // [ranks][places afterwards] experts to read, or -1
};

// The rank in the new group that each of its ranks has in everyone. Throws Error(kInvalidArgument),
// on every rank the same, where the new ranks are not each there once, or nobody has the layer.
std::vector<int32_t> ranks_of_new_group(std::span<const RegroupRank> everyone);

// Experts come from the rank that gives least so far. Throws Error(kTensorMissing) for one that
// nobody has on a rank without a source.
RegroupMoves plan_regroup(std::span<const RegroupRank> everyone);

}  // namespace conclave::inline v0

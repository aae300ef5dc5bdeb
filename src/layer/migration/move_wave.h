// Moves that run at once, and the comparison of what both ends of each have.
#pragma once

#include "layer/migration/move_slabs.h"
#include "placement/moves.h"

#include <span>
#include <vector>

namespace conclave::inline v0 {

// Moves of which no two have a rank in common, cut out of a round in order: each takes as long as
// one expert, so that a rank without any waits no longer for the others.
std::vector<std::vector<ExpertMove>> waves_of(std::span<const ExpertMove> moves);

// Collective, as move_slabs: copies, and compares the hashes of both ends. Throws on every rank:
// CommError(kCommMismatch) naming the rank at the other end, CommError(kCommAborted) where another
// rank failed, what `pack` threw on this one. `peers_know` is true after an error that every rank
// has seen over a communicator that still serves.
void move_wave(const MoveCall& call, bool& peers_know);

}  // namespace conclave::inline v0

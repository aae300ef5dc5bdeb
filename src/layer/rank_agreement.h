// What ranks must agree on before and during a collective forward.
#pragma once

#include "layer/plan.h"

#include "conclave/comm.h"

#include <cstdint>

namespace conclave::inline v0 {

// Collective when ep_size > 1. Throws CommError(kCommMismatch) naming a rank and the first field
// that differs: on every rank, instead of a hang or a wrong result later.
void check_ranks_agree(const LayerPlan& plan, Communicator* communicator);

// The largest chunk count of all ranks: each takes part in every exchange.
int64_t agree_on_chunks(int64_t chunks, const LayerPlan& plan, Communicator* communicator);

}  // namespace conclave::inline v0

// Plan time: how large the chunks of a call are, in which order they run, and what is done while
// rows travel between ranks.
#pragma once

#include "layer/plan.h"

#include "conclave/context.h"

namespace conclave::inline v0 {

// Needs the kernels and the rank's part, and decides what the dispatcher is made for.
void choose_chunks(LayerPlan& plan, const Context& context);

// Lists what was chosen or rejected, and why. Needs a dispatcher, which says that ranks that
// exchange rows have a communicator.
void record_chunks(LayerPlan& plan, const Context& context);

}  // namespace conclave::inline v0

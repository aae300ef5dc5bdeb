// Runs one MoE layer on one batch, on a device.
#pragma once

#include "layer_run.h"

namespace conclave::tool {

// Copies the inputs over, then fills the allocated tensors of `run` and its time.
void run_on_device(const Context& context, const MoeLayer& layer, const LayerInput& input,
                   int32_t repetitions, LayerRun& run);

}  // namespace conclave::tool

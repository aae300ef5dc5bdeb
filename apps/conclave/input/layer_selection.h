// --layers: which MoE layers of a checkpoint.
#pragma once

#include "conclave/checkpoint.h"

#include <string>
#include <vector>

namespace conclave::tool {

// "0-3,7"; empty: all MoE layers. A range takes the MoE layers inside it and may pass over dense
// ones; a single number must be an MoE layer. Ascending, without repeats. Throws
// Error(kLayerNotFound), and Error(kUnsupported) for a layer that cannot run.
std::vector<const CheckpointLayer*> select_layers(const Checkpoint& checkpoint,
                                                  const std::string& layers);

}  // namespace conclave::tool

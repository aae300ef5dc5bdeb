// MODEL_DIR, --layers, --extra-layers and --experts: a model, its MoE layers and their experts.
#pragma once

#include "command_line.h"

#include "conclave/checkpoint.h"

#include <string>
#include <vector>

namespace conclave::tool {

// Parses "0-3,7"; empty means all MoE layers. A range takes the MoE layers inside it and may pass
// over dense ones; a single number must be an MoE layer. Returns them ascending, without repeats.
// Throws Error(kLayerNotFound), and Error(kUnsupported) for a layer that cannot run.
std::vector<const CheckpointLayer*> select_layers(const Checkpoint& checkpoint,
                                                  const std::string& layers);

// Adds the argument for the model, which must be given.
void add_model_argument(Command& command, std::string& model_dir);
// Adds the option whose text select_layers takes.
void add_layers_option(Command& command, std::string& layers);
// Adds the option for MoE layers that serve multi-token prediction.
void add_extra_layers_option(Command& command, bool& extra_layers);

// Adds the option for models whose layers have one set of experts for text and another for images.
void add_expert_set_option(Command& command, std::string& experts);
// Returns kText for "" and "text".
ExpertSet parse_expert_set(const std::string& experts);

}  // namespace conclave::tool

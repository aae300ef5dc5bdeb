// The walk by which a layer comes to other ranks: agree, plan, take what is here, move what is not,
// agree that all have it. Steps of one rank alone end in a word to the others, so that what fails
// on one ends all of them.
#pragma once

#include "layer/engine.h"
#include "layer/migration/epoch_switch.h"
#include "layer/regroup/regroup_plan.h"

#include "conclave/context.h"
#include "conclave/regroup.h"
#include "conclave/spec.h"

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace conclave::inline v0 {

// The parts of the layer before, on a rank that has it.
struct LayerBefore {
  const Context& context;
  const MoeSpec& spec;  // as given
  const Engine& engine;
  LayerWeights& weights;
  EpochSwitch& epochs;
  std::function<std::vector<int32_t>()> places;  // the expert in each, -1 for none
  std::exception_ptr refusal;                    // why it cannot be used now
};

// The parts of the layer afterwards.
struct LayerAfter {
  MoeSpec spec;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<LayerWeights> weights;
};

struct RegroupRequest {
  const LayerBefore* before = nullptr;  // null: this rank joins
  const Context* context = nullptr;     // for the new group; null: this rank leaves
  const MoeSpec& spec;
  const LayerOptions& layer_options;
  const RegroupOptions& options;
};

// Works as regroup, hand_over and join_layer do. Nothing on a rank that leaves.
std::optional<LayerAfter> regroup_ranks(const RegroupRequest& request);

}  // namespace conclave::inline v0

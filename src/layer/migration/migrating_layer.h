// A layer as a migration sees it: the parts that outlive the layer itself.
#pragma once

#include "layer/migration/epoch_switch.h"
#include "layer/migration/movable_experts.h"
#include "layer/plan_base.h"

#include "conclave/comm.h"

#include <memory>

namespace conclave::inline v0 {

struct MigratingLayer {
  std::shared_ptr<const void> owners;  // keeps all that follows
  const PlanBase& plan;
  EpochSwitch& epochs;
  MovableExperts experts;
  Support movable;
  // The key of its adapters: a layer has none while experts move, but may have had some.
  int64_t adapters = 0;
  Communicator* communicator = nullptr;  // the context's
};

}  // namespace conclave::inline v0

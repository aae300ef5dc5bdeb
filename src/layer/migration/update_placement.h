// The synchronous form: experts move between two forwards, while every rank waits.
#pragma once

#include "layer/migration/epoch_switch.h"
#include "layer/migration/movable_experts.h"
#include "layer/plan_base.h"

#include "conclave/comm.h"
#include "conclave/error.h"
#include "conclave/migration.h"

#include <exception>

namespace conclave::inline v0 {

struct UpdateRequest {
  const PlanBase& plan;
  Communicator* communicator = nullptr;  // the context's
  EpochSwitch& epochs;
  const Support& movable;  // whether this layer's experts can move
  int64_t adapters = 0;    // the key of its adapters
  const MovableExperts& experts;
  const ExpertSlots& slots;
  const MigrationOptions& options;
  std::exception_ptr refusal;  // why this rank cannot take part
};

// Works as MoeLayer::update_placement.
void update_placement(const UpdateRequest& request);

// Says what a migration must have in common with its layer. Throws Error(kInvalidArgument).
void check_migration_communicator(const Communicator& communicator, const ParallelSpec& parallel);

}  // namespace conclave::inline v0

// The home rank's half of an expert-parallel dispatch: decides which rows go where, and where their
// results will come home.
#pragma once

#include "dispatch/ep_plan.h"
#include "dispatch/ep_tables.h"

#include "conclave/placement.h"
#include "conclave/routing.h"

namespace conclave::inline v0::dispatch {

// Fills send_rows, send_base, home_rows and home_base. Skips ids outside [0, E).
void count_sends(const EpPlan& plan, const Routing& routing, const ExpertPlacement& placement,
                 const EpTables& tables);

// Writes ids and weights of every send block, send_token and home_row. A token that names an
// expert twice requests its result once: both slots read it, or their weights are added up.
void describe_sends(const EpPlan& plan, const Routing& routing, const ExpertPlacement& placement,
                    const EpTables& tables);

}  // namespace conclave::inline v0::dispatch

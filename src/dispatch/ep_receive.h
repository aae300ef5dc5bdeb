// The owning rank's half of a dispatch: checks received data before any of it serves as an index.
#pragma once

#include "dispatch/ep_plan.h"
#include "dispatch/ep_tables.h"

namespace conclave::inline v0::dispatch {

// Reads the received blocks and fills recv_rows, recv_base, first_owed, owed_rows and owed_base.
// Throws CommError(kCommMismatch) naming the rank whose ids are not ours or repeat in a row.
void check_received(const EpPlan& plan, const EpTables& tables);

}  // namespace conclave::inline v0::dispatch

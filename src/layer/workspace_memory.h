// Refuses plans whose calls could never have a workspace.
#pragma once

#include "layer/plan_base.h"

#include <cstdint>

namespace conclave::inline v0 {

// A plan promises memory for its tokens. Throws Error(kOutOfMemory) naming these, the bytes of its
// workspace and the device's if it takes more than the device has; 0: unknown, nothing is refused.
void check_workspace_memory(const PlanBase& plan, int64_t memory_bytes);
// The same for this machine's memory, or the control group's part of it.
void check_workspace_memory(const PlanBase& plan);

}  // namespace conclave::inline v0

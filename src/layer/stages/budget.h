// A budget of experts: routes the whole call once to learn which experts its tokens choose, and
// bans all but the most weighty of them for the forward itself.
#pragma once

#include "layer/stages/chunk.h"
#include "routing/limits.h"

#include "conclave/comm.h"
#include "conclave/layer.h"

#include <optional>

namespace conclave::inline v0 {

// The caller's bans joined with those that the call's budget adds; none if it adds nothing.
// `communicator`: the ranks whose tokens share the budget, null for this one alone. Collective over
// them. Allocates.
std::optional<routing::ExpertBans> bans_of_budget(const HostCall& call, Communicator* communicator);
// They, as an argument of the call.
ConstTensorView view_of(const routing::ExpertBans& bans, const HostCall& call);

}  // namespace conclave::inline v0

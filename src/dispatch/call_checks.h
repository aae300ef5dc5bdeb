// Checks that every dispatcher makes before it touches memory or peers.
#pragma once

#include "core/flow.h"
#include "dispatch/dispatcher.h"

#include "conclave/error.h"

#include <cstddef>
#include <memory>
#include <span>

namespace conclave::inline v0::dispatch {

// Yes for sizes a dispatcher can plan for: all positive, row_bytes a multiple of 64.
Support plannable(const DispatchProblem& problem);

// The epoch that the problem is planned with. Throws Error(kInvalidArgument).
std::shared_ptr<const PlacementEpoch> epoch_of(const DispatchProblem& problem);
// The epoch of a call: the one given, or `planned`. Throws Error(kInvalidArgument) if it cannot
// follow the planned one.
const PlacementEpoch& epoch_of(const DispatchArgs& args, const PlacementEpoch& planned);

// Throws Error(kUnsupported) with the reason of `support` unless it is yes.
void require(const Support& support);
// Throw Error(kShape, kDType, kInvalidArgument, kMisaligned or kWorkspaceTooSmall).
void check_dispatch(const DispatchProblem& problem, const Routing& routing, const RowBundle& rows);
void check_combine(const DispatchProblem& problem, const CombineArgs& args);
void check_workspace(std::span<const std::byte> workspace, size_t needed_bytes);

}  // namespace conclave::inline v0::dispatch

// Checks that every dispatcher makes before it touches memory or peers.
#pragma once

#include "core/flow.h"
#include "dispatch/dispatcher.h"

#include "conclave/error.h"

#include <cstddef>
#include <span>

namespace conclave::inline v0::dispatch {

// Yes for sizes a dispatcher can plan for: all positive, row_bytes a multiple of 64.
Support plannable(const DispatchProblem& problem);

// Throws Error(kUnsupported) with the reason of `support` unless it is yes.
void require(const Support& support);
// Throw Error(kShape, kDType, kInvalidArgument, kMisaligned or kWorkspaceTooSmall).
void check_dispatch(const DispatchProblem& problem, const Routing& routing, const RowBundle& rows);
void check_combine(const DispatchProblem& problem, const CombineArgs& args);
void check_workspace(std::span<const std::byte> workspace, size_t needed_bytes);

}  // namespace conclave::inline v0::dispatch

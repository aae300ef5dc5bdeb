// Dispatchers "ep.variable" and "ep.fixed_slots": experts are spread over the ranks of a
// communicator. With EpCombine::kUnreduced a token's result has the same bits as on one rank (D3).
#pragma once

#include "dispatch/dispatcher.h"

#include <memory>

namespace conclave::inline v0::dispatch {

Support ep_variable_supports(const DispatchProblem& problem);
Support ep_fixed_slots_supports(const DispatchProblem& problem);
std::unique_ptr<Dispatcher> make_ep_dispatcher(const DispatchProblem& problem);

}  // namespace conclave::inline v0::dispatch

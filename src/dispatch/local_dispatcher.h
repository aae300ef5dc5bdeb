// Dispatcher "local": no row moves. One rank holds every expert, or, with Reduce::kPartial, rows
// count only for the experts that this rank holds. The batch indexes the caller's rows and combine
// reads the experts' rows in place.
#pragma once

#include "dispatch/dispatcher.h"

#include <memory>

namespace conclave::inline v0::dispatch {

Support local_supports(const DispatchProblem& problem);
std::unique_ptr<Dispatcher> make_local_dispatcher(const DispatchProblem& problem);

}  // namespace conclave::inline v0::dispatch

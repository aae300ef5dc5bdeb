// Checks of an operation's arguments, the same for every transport.
#pragma once

#include "conclave/comm.h"

namespace conclave::inline v0::comm {

// Throws Error unless every transport may start the operation: sizes, counts, types, the peer, and
// that send and recv do not overlap.
void check_arguments(const CommOperation& operation, const Communicator& communicator);
// Throws Error(kUnsupported) if this communicator lacks the memory or stream order that the
// operation asks for.
void check_features(const CommOperation& operation, const Communicator& communicator);

}  // namespace conclave::inline v0::comm

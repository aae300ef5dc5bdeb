// Whether a peer's process on this host still lives: MPI does not say so, and a connection stays
// open while a child of that process holds it.
#pragma once

#include "comm/message/wire.h"

namespace conclave::inline v0::comm {

Identity this_process();

// False if the process of `peer` is known to have ended. True where this cannot be seen: on another
// host, in another namespace of processes, or without /proc.
bool may_live(const Identity& peer, const Identity& self);

}  // namespace conclave::inline v0::comm

// Whether a peer's process on this host still lives: MPI does not say so, and a connection stays
// open while a child of that process holds it.
#pragma once

#include "comm/message/wire.h"

#include <chrono>

namespace conclave::inline v0::comm {

// A look at a process is a few calls of the system.
inline constexpr auto kBetweenLooks = std::chrono::milliseconds(20);

Identity this_process();

// False if the process of `peer` is known to have ended. True where this cannot be seen: on another
// host, in another namespace of processes, or without /proc.
bool may_live(const Identity& peer, const Identity& self);

}  // namespace conclave::inline v0::comm

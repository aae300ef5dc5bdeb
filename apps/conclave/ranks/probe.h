// Tries a transport out in a process of its own: a library that cannot start may end the process.
#pragma once

#include "conclave/comm.h"

#include <vector>

namespace conclave::tool {

// Says what transports() does, and where ranks are processes once one has connected: `reason` then
// has what only a running library knows, or why it does not run. `command` is this command's name,
// in whose place the probe is started.
std::vector<TransportInfo> probed_transports(const char* command);

}  // namespace conclave::tool

// One rank of "local" on its own. Ranks that are threads share a group object, which only
// make_local_group can hand to all of them.
#pragma once

#include "conclave/comm.h"
#include "conclave/error.h"

#include <memory>

namespace conclave::inline v0::comm {

// Yes for a group of one.
Support local_supports(const ConnectOptions& options);
std::unique_ptr<Communicator> connect_local(const ConnectOptions& options);

}  // namespace conclave::inline v0::comm

// Ranks that know where each other can be reached become connected.
#pragma once

#include "comm/tcp/exchange.h"
#include "comm/tcp/socket.h"

#include <chrono>
#include <cstdint>
#include <vector>

namespace conclave::inline v0::comm {

using Sockets = std::vector<Socket>;  // [ranks]

// `lanes` connections to every other rank, for what must not wait for each other; none to `rank`
// itself. Each rank connects to those before it, at one address after the other, and waits at
// `listener` for those behind it. Throws CommError naming a rank that did not come until then.
std::vector<Sockets> meet_all(const Listener& listener, const std::vector<Card>& cards,
                              int32_t rank, int32_t lanes,
                              std::chrono::steady_clock::time_point until);

}  // namespace conclave::inline v0::comm

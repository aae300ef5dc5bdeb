// The counters from which blocks of streamed products draw: a workspace has them in these places.
#pragma once

#include <cstdint>

namespace conclave::inline v0::experts::stream {

// Each workspace begins with so many bytes for them: a HandOver, and a TicketCounter at kTicketsAt.
inline constexpr int64_t kCounterBytes = 256;
inline constexpr int64_t kTicketsAt = 16;

}  // namespace conclave::inline v0::experts::stream

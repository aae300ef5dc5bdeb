// Distinguishes a forked child from the process that made an object.
#pragma once

#include <cstdint>

namespace conclave::inline v0::cpu {

// How often this process and its ancestors have forked since the first call; a plain load. An
// object that keeps the value from its creation can tell whether it is used in a child.
uint64_t fork_count() noexcept;

}  // namespace conclave::inline v0::cpu

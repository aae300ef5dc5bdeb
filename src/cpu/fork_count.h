// Tells a forked child from the process that made an object.
#pragma once

#include <cstdint>

namespace conclave::inline v0::cpu {

// How often this process and its ancestors have forked since the first call. An object that keeps
// the value of its creation compares it to learn whether it is used in a child; a plain load.
uint64_t fork_count() noexcept;

}  // namespace conclave::inline v0::cpu

// Which memory is new from the system, and so holds zeros.
#pragma once

#include "conclave/context.h"

#include <cstddef>

namespace conclave::inline v0::cpu {

// True if a block of this size from this allocator has not been used before.
bool gives_zeros(const HostAllocator& allocator, size_t bytes);

}  // namespace conclave::inline v0::cpu

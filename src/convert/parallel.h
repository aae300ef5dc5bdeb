// Runs a body for every index on the context's threads.
#pragma once

#include "conclave/context.h"

#include <cstddef>
#include <functional>

namespace conclave::inline v0::conversion {

// Indices are taken in order by whoever is free. What the body throws first is thrown here, when
// all have stopped.
void for_each_index(const Context& context, size_t count, const std::function<void(size_t)>& body);

}  // namespace conclave::inline v0::conversion

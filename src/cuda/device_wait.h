// Waits for all work of a device: where memory is to go that any stream, or a graph, may still use.
#pragma once

#include "conclave/version.h"

namespace conclave::inline v0::cuda {

// Waits for the current device. False where one of its streams is being captured: CUDA lets nobody
// wait then, and ends the capture. Throws Error(kDevice).
bool wait_for_device();

// The same as a destructor asks: false if work may still run. A device that has failed runs none.
bool has_ended(int ordinal) noexcept;

}  // namespace conclave::inline v0::cuda

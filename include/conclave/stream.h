// A queue of work of a device.
#pragma once

#include "conclave/version.h"

namespace conclave::inline v0 {

// A queue of work of a device, as its own library names it: conclave/interop/cuda.h converts. Never
// owned. A null handle means no stream: "cpu" has none, and a CUDA call without one is refused.
struct Stream {
  void* handle = nullptr;
  friend bool operator==(const Stream&, const Stream&) = default;
};

}  // namespace conclave::inline v0

// DeviceRuntime on CUDA: one object per device of this process.
#pragma once

#include "layer/device_runtime.h"

#include "conclave/error.h"

#include <cstdint>
#include <string>

namespace conclave::inline v0 {

// Describes every device in words.
std::string describe_cuda();
// Yes if device `ordinal` can run layers: the driver has it, and the plain kernels were compiled
// for it. Kernels of a single architecture are not required: plans do without them.
Support cuda_usable(int32_t ordinal);
// The runtime of device `ordinal`, which must be usable. Lives as long as the process.
const DeviceRuntime* cuda_runtime(int32_t ordinal);

}  // namespace conclave::inline v0

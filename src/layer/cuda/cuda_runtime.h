// DeviceRuntime on CUDA: one object a device of this process.
#pragma once

#include "layer/device_runtime.h"

#include "conclave/error.h"

#include <cstdint>
#include <string>

namespace conclave::inline v0 {

// Every device in words.
std::string describe_cuda();
// Whether device `ordinal` can run layers: a driver, the device, and Hopper.
Support cuda_usable(int32_t ordinal);
// Lives as long as the process. `ordinal` is usable.
const DeviceRuntime* cuda_runtime(int32_t ordinal);

}  // namespace conclave::inline v0

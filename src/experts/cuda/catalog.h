// The expert kernels of the GPU.
#pragma once

#include "core/catalog.h"
#include "experts/cuda/device_experts.h"

namespace conclave::inline v0::experts {

Catalog<DeviceKernelRow> device_kernel_catalog();

// The inverse of to_string(DeviceTile). Throws
// Error(kInvalidArgument) naming the text.
DeviceTile parse_tile(std::string_view text);

}  // namespace conclave::inline v0::experts

// Finds the kernels of byte_offset_kernels.h for rows with adapters.
#pragma once

#include "experts/cuda/device_experts.h"
#include "experts/cuda/sm90/stream/adapted_codes.cuh"

namespace conclave::inline v0::experts::stream {

AdaptedCodesPair find_adapted_of_bytes_with_offsets(const DeviceTile& tile);
AdaptedCodesPair find_adapted_of_bytes_with_steps(const DeviceTile& tile);

}  // namespace conclave::inline v0::experts::stream

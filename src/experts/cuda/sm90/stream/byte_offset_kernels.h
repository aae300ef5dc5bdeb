// Finds the kernels of byte_offsets.h.
#pragma once

#include "experts/cuda/device_experts.h"
#include "experts/cuda/sm90/stream/config.cuh"
#include "experts/cuda/sm90/stream/launch.h"

namespace conclave::inline v0::experts::stream {

// With scales and offsets of float32, and with both in steps.
KernelPairOf<CodedParams> find_kernels_of_bytes_with_offsets(const DeviceTile& tile);
KernelPairOf<CodedParams> find_kernels_of_bytes_with_steps(const DeviceTile& tile);

}  // namespace conclave::inline v0::experts::stream

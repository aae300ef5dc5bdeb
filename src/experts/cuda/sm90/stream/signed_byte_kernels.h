// Finds the kernels of signed_bytes.h.
#pragma once

#include "experts/cuda/device_experts.h"
#include "experts/cuda/sm90/stream/config.cuh"
#include "experts/cuda/sm90/stream/launch.h"

namespace conclave::inline v0::experts::stream {

KernelPairOf<CodedParams> find_kernels_of_signed_bytes(const DeviceTile& tile);

}  // namespace conclave::inline v0::experts::stream

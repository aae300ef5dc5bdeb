// Finds the kernels of codes that lie as they are stored, for rows with adapters.
#pragma once

#include "experts/cuda/device_experts.h"
#include "experts/cuda/sm90/stream/adapted_codes.cuh"
#include "experts/cuda/sm90/stream/stream_codes.h"

namespace conclave::inline v0::experts::stream {

// With values in one term, and in two.
AdaptedCodesPair find_adapted_as_stored(const CodeKernelForm& form, const DeviceTile& tile);
AdaptedCodesPair find_adapted_of_terms(const CodeKernelForm& form, const DeviceTile& tile);

}  // namespace conclave::inline v0::experts::stream

// Finds kernels of codes of 4 bits whose scales, and offsets, are steps of 16 columns, for rows
// with adapters.
#pragma once

#include "experts/cuda/sm90/stream/adapted_codes.cuh"

namespace conclave::inline v0::experts::stream {

AdaptedCodesPair find_adapted_times_steps(const DeviceTile& tile);
AdaptedCodesPair find_adapted_times_offset_steps(const DeviceTile& tile);

}  // namespace conclave::inline v0::experts::stream

// The tiles of kernels of codes of 2 bits.
#pragma once

#include "experts/cuda/sm90/stream/offset_tiles.cuh"
#include "experts/cuda/sm90/stream/step_products.cuh"

namespace conclave::inline v0::experts::stream {

inline constexpr Codes kSmallCodes{
    .bits = 2, .steps_of_sum = 1, .offsets = true, .in_order = true, .steps = true};

}  // namespace conclave::inline v0::experts::stream

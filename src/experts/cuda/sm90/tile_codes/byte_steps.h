// Finds kernels of codes of 8 bits whose scales and offsets are FactorForm::kSteps.
#pragma once

#include "experts/cuda/sm90/tile_codes/kernels.h"

namespace conclave::inline v0::experts::tile_codes {

KernelPair find_shifted_kernels_of_8_bits_with_steps(const DeviceTile& tile);

}  // namespace conclave::inline v0::experts::tile_codes

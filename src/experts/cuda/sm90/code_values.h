// Values of codes as kernels for Hopper look them up.
#pragma once

#include "conclave/dtype.h"

#include <cstdint>

namespace conclave::inline v0::experts {

// For each code of a format the nearest bf16 of its value in the lower half, and above it that of
// what this leaves.
void fill_bf16_values(DType dtype, uint32_t (&values)[256]);

}  // namespace conclave::inline v0::experts

// Values of codes as kernels for Hopper look them up.
#pragma once

#include "conclave/dtype.h"

#include <cstdint>

namespace conclave::inline v0::experts {

// Each code of a format has a number of bf16 in the lower half, and above it the nearest of what
// this leaves. A value is `unit` times their sum.
struct Bf16Values {
  uint32_t of[256] = {};
  float unit = 1;
};

// One number has all of a value where takes_two_terms is false.
Bf16Values bf16_values(DType dtype);
bool takes_two_terms(DType dtype);

}  // namespace conclave::inline v0::experts

// Elementwise reduction of byte buffers, one addend at a time.
#pragma once

#include "conclave/comm.h"
#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::comm {

// True for the types that reductions support: kF32, kF64, kI32, kI64.
bool is_reducible(DType dtype) noexcept;

// accumulated[i] = accumulated[i] op value[i]. Buffers may be unaligned. Integer sums wrap; a NaN
// operand of kMax gives NaN.
void reduce_into(std::byte* accumulated, const std::byte* value, int64_t bytes, DType dtype,
                 ReduceOp op) noexcept;

}  // namespace conclave::inline v0::comm

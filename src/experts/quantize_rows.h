// Converts the caller's hidden rows to the row format that a kernel reads.
#pragma once

#include "core/flow.h"

#include "conclave/context.h"
#include "conclave/tensor.h"

#include <cstdint>

namespace conclave::inline v0::experts {

// hidden [T, H] f32, f16 or bf16 (rows may be strided) -> T rows of `row_bytes` at `destination`,
// zero padded. Each row depends on its own input only.
RowBundle quantize_rows(const ConstTensorView& hidden, DType row_dtype, int64_t row_bytes,
                        std::byte* destination, Executor& executor);

// The same for row t times each of weights[t, 0..k-1]: T * k rows, those of a token next to each
// other. Each value is one float32 product, rounded once to the row type.
RowBundle quantize_weighted_rows(const ConstTensorView& hidden, const float* weights, int64_t top_k,
                                 DType row_dtype, int64_t row_bytes, std::byte* destination,
                                 Executor& executor);

}  // namespace conclave::inline v0::experts

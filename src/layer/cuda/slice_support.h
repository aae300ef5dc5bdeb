// Which tensor-parallel slices of quantised matrices the kernels of a GPU read.
#pragma once

#include "conclave/error.h"
#include "conclave/spec.h"

#include <cstdint>

namespace conclave::inline v0 {

// Yes if every slice of activated rows begins with a group of columns, and no scale covers a whole
// row: kernels count groups from the first column of a slice. Where slices of weights may begin,
// kernels say themselves.
Support tensor_slices_support(const QuantSpec& quant, int64_t intermediate_size, int32_t ranks);

}  // namespace conclave::inline v0

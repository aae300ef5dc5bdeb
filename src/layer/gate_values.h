// Values of a gate's matrix that make logits without an order.
#pragma once

#include "conclave/context.h"
#include "conclave/tensor.h"

#include <cstdint>

namespace conclave::inline v0 {

// Counts rows with NaN, and warns of them in the context's log. Their experts have no logit, and
// are chosen only where nothing else can be (docs/numerics.md), which no result shows.
int64_t count_nan_rows(const Context& context, const ConstTensorView& gate);

}  // namespace conclave::inline v0

// Values of a gate's matrix that make logits without an order.
#pragma once

#include "conclave/context.h"
#include "conclave/tensor.h"

namespace conclave::inline v0 {

// Warns of rows with NaN in the context's log. Their experts have no logit, and are chosen only
// where nothing else can be (docs/numerics.md), which no result shows.
void warn_of_nan_rows(const Context& context, const ConstTensorView& gate);

}  // namespace conclave::inline v0

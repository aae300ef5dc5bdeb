// The logits of a chunk: the caller's, or the layer's own gate product.
#pragma once

#include "layer/stages/chunk.h"

namespace conclave::inline v0 {

// [count, num_logits] float32. The gate reads router_input or hidden, normalised if the spec says
// so; a bias is added to the float32 product before it is rounded to RouterSpec::logits_dtype. Null
// if there are neither a gate nor given logits (simulated routing needs none). `rows` are the
// chunk's hidden rows in the kernel's format.
const float* logits_of_chunk(const PipelineArgs& args, const RowBundle& rows);

}  // namespace conclave::inline v0

// The shared expert: one more expert that every token uses.
#pragma once

#include "layer/pipeline.h"

namespace conclave::inline v0 {

// Float32 rows [count, H] at shared_row_stride, gated where the spec says so, zero for padding;
// null without shared experts.
const float* run_shared_expert(const PipelineArgs& args, const RowBundle& rows);

}  // namespace conclave::inline v0

// The rows that experts read as their own.
#pragma once

#include "layer/cuda/plan.h"
#include "layer/stages/cuda/own_rows.h"

namespace conclave::inline v0 {

// The form in which the part's kernels read them, or float32 where they become codes. The plain
// kernel reads float32, others bf16.
OwnRowForm own_row_form(const CudaMlpPlan& part);

}  // namespace conclave::inline v0
